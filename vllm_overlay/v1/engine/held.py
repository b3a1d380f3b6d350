# SPDX-License-Identifier: Apache-2.0
"""Up to 0.21.0: an idle engine core hears when the blocks of finished requests may be freed.

A worker says in a step that a peer has read a request's blocks, that its lease has run out, or that
the receive of one that was aborted is over. An engine without unfinished requests takes no steps,
so it keeps those blocks until its next request; a router that goes by the use of the KV cache sends
it none. Upstream's 0.22.0 takes one step after the other meanwhile; here the core waits, and looks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCoreProc


def holds_blocks(core: EngineCoreProc) -> bool:
    """Whether requests that have finished keep their blocks for a connector."""
    scheduler: Any = core.scheduler
    if scheduler.get_kv_connector() is None:
        return False
    queues = ("waiting", "skipped_waiting", "running")
    if not all(hasattr(scheduler, name) for name in (*queues, "requests")):  # it is not vLLM's
        return False
    return len(scheduler.requests) > sum(len(getattr(scheduler, name)) for name in queues)

# SPDX-License-Identifier: Apache-2.0
"""All releases: what counts as work for an engine without requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler


def has_clean_up(scheduler: Scheduler) -> bool:
    """Whether a step is due although no request wants one.

    Workers must hear which requests have finished; and the engine core may be about to look after
    what a KV connector still has to say to a peer, see `vllm_overlay.v1.engine.idle`.
    """
    looking = getattr(scheduler.connector, "looking", False)
    return bool(scheduler.finished_req_ids) or looking is True

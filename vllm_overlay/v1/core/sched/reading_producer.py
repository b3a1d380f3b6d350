# SPDX-License-Identifier: Apache-2.0
"""From 0.24.0 on: a P that reads D's answers back spares running steps, as whoever consumes does.

A step that runs may still write the blocks of a request that ends or is preempted, and what a
connector loads comes in no order with it. So upstream holds such blocks back, but for a connector
whose role is to consume. With `bidirectional_kv_xfer` a P of the role `kv_producer` loads, too:
what D keeps of a conversation's earlier turns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler


def spares_running_steps(scheduler: Scheduler) -> None:
    """Have the scheduler hold blocks back if it can have a second turn read from D."""
    config: Any = scheduler.vllm_config
    extra = config.kv_transfer_config.kv_connector_extra_config
    if config.max_concurrent_batches > 1 and _reads_back(extra):
        scheduler.defer_block_free = True


def _reads_back(extra: Any) -> bool:  # noqa: ANN401 - of the user
    """Whether a connector's own configuration, or that of one it is made of, says so."""
    if not isinstance(extra, dict):
        return False
    if extra.get("bidirectional_kv_xfer", False):
        return True
    parts = extra.get("connectors")  # of a MultiConnector
    return isinstance(parts, list) and any(
        _reads_back(part.get("kv_connector_extra_config"))
        for part in parts
        if isinstance(part, dict)
    )

# SPDX-License-Identifier: Apache-2.0
"""All releases: what counts as work for an engine without requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.connector import WantsLooks

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler


def has_clean_up(scheduler: Scheduler) -> bool:
    """Whether a step is due although no request wants one.

    Workers must hear which requests have finished; and the engine core may be about to look after
    what a KV connector still has to say to a peer, see `vllm_overlay.v1.engine.idle`.
    """
    connector = scheduler.connector
    return bool(scheduler.finished_req_ids) or (
        isinstance(connector, WantsLooks) and connector.looking
    )

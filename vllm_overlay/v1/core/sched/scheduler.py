# SPDX-License-Identifier: Apache-2.0
"""What counts as work for an engine without requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.connector import needs_tick

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler


def has_clean_up(scheduler: Scheduler) -> bool:
    """Whether a step is due although no request wants one.

    Workers must hear which requests have finished, and the KV connector may have something left
    to say to a peer.
    """
    return bool(scheduler.finished_req_ids) or needs_tick(scheduler.connector)

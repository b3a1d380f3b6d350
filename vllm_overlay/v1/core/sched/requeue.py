# SPDX-License-Identifier: Apache-2.0
"""Up to 0.30.0: a request that received KV, and has to do without it, waits as a preempted one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request


def wait_as_preempted(scheduler: Scheduler, request: Request) -> None:
    """Let `request` wait in front of all others, without blocks; it is not received again.

    It must be in neither queue. What the prefix cache finds of it stays found.
    """
    if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
        scheduler._try_promote_blocked_waiting_request(request)
    scheduler.kv_cache_manager.free(request)
    request.num_computed_tokens = 0
    # From 0.23.0 on: what is kept free for it would keep out who comes before it.
    getattr(scheduler, "_inflight_prefills", set()).discard(request)
    scheduler.waiting.prepend_request(request)

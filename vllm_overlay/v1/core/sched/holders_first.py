# SPDX-License-Identifier: Apache-2.0
"""From 0.30.0 on: a request whose receive has failed does not hold up those that hold blocks.

The scheduler looks first at who holds blocks: what has been received, or is about to be. If a
receive of several KV-cache groups fails, the request is set back to its start, and when it is
looked at, its blocks are freed; but it is left among these. When it then has no room, nobody behind
it is looked at: not those that have all that they need, nor others whose receives have failed, and
what they would free is what it waits for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.v1.core.sched.request_queue import RequestQueue
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request


def lets_holders_run(scheduler: Scheduler, request: Request) -> bool:
    """Put a request that found no room behind those that hold blocks, if it holds none itself.

    So are others in front of these that hold none either, in their order. But first all whose
    receives have failed give up what they received into: that may be the room.

    By priority no queue has places: there they wait with those that hold none. Not while the
    scheduler is paused, which is until its queues of holders and of running requests are empty.

    Returns:
        Whether to look again: at this request, or at others behind it that do hold some.
    """
    # In 0.30.0 it is a queue of those, too, that wait for something else.
    known = hasattr(scheduler, "kv_holding_waiting")
    holders: RequestQueue = getattr(scheduler, "kv_holding_waiting" if known else "skipped_waiting")
    if not holders or holders.peek_request() is not request:
        return False
    if _holds_blocks(request):
        return False
    if _failed_ones_give_up_blocks(scheduler, holders):
        return True
    order = list(holders)
    last = max((n for n, one in enumerate(order, 1) if _holds_blocks(one)), default=0)
    moved = [one for one in order[:last] if not _holds_blocks(one)]
    if not moved:
        return False
    if isinstance(holders, FCFSRequestQueue):
        holding = [one for one in order[:last] if _holds_blocks(one)]
        holders.clear()
        holders.extend([*holding, *moved, *order[last:]])
    elif scheduler._pause_state == PauseState.UNPAUSED:
        holders.remove_requests(moved)
        for one in reversed(moved):
            scheduler.waiting.prepend_request(one)
    else:
        return False
    # Nothing is kept free for them, as on a preemption.
    scheduler._inflight_prefills.difference_update(moved)
    return True


def _failed_ones_give_up_blocks(scheduler: Scheduler, holders: RequestQueue) -> bool:
    """Do what the scheduler does when it looks at them. Whether there were any."""
    known = hasattr(scheduler, "_handle_blocked_waiting_request")  # in 0.30.0 it is not
    name = "_handle_blocked_waiting_request" if known else "_try_promote_blocked_waiting_request"
    promote = getattr(scheduler, name)
    over = scheduler.failed_recving_kv_req_ids & scheduler.finished_recving_kv_req_ids
    failed = [one for one in holders if one.request_id in over and not one.num_computed_tokens]
    for one in failed:
        promote(one)
        scheduler._inflight_prefills.discard(one)
    return bool(failed)


def _holds_blocks(request: Request) -> bool:
    """Whether it does: also one whose receive has failed for a rank, and goes on for another."""
    return request.num_computed_tokens > 0 or request.status == RequestStatus.WAITING_FOR_REMOTE_KVS

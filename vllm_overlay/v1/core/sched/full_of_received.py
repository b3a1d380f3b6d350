# SPDX-License-Identifier: Apache-2.0
"""Up to 0.30.0: requests that hold received KV, and all of the cache, do not wait for each other.

To run, a received request may need blocks that it has none of yet: for what its draft model
guesses, or for the last token, where what is loaded ends with a block. Loads can take every block
between them, and the first that has arrived then finds none for the rest; those behind it are not
looked at. Nothing runs then, so nothing ends, and no block becomes free: waiting requests are not
preempted. Here the last of them is, once that is certain. What it received is lost, but for what
the prefix cache finds again, and it is computed by D.

A step without slots for guesses would be no way out: the draft model writes to them, whoever they
belong to.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from itertools import chain
from typing import TYPE_CHECKING, TypeAlias

from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.request import RequestStatus

from vllm_overlay.distributed.kv_transfer.fix_counts import Acted, count
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.present import transfers_with_nixl
from vllm_overlay.v1.core.sched.requeue import wait_as_preempted

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

Schedule: TypeAlias = "Callable[..., SchedulerOutput]"


def last_received_gives_way(schedule: Schedule) -> Schedule:
    """Make `Scheduler.schedule` free the blocks of a received request when nothing else can.

    It decides as on stock; what it frees is there for the next step.
    """

    @wraps(schedule)
    def schedule_and_free(self: Scheduler, *args: bool, **kwargs: bool) -> SchedulerOutput:
        decided = schedule(self, *args, **kwargs)
        idle = not decided.total_num_scheduled_tokens and not self.running
        if idle and (self.waiting or self.skipped_waiting):
            last = _last_of_the_stuck(self)
            if last is not None:
                self.skipped_waiting.remove_requests([last])
                self.waiting.remove_requests([last])
                wait_as_preempted(self, last)
                count(Acted.RECEIVED_GAVE_WAY)
        return decided

    return schedule_and_free


def _last_of_the_stuck(scheduler: Scheduler) -> Request | None:
    """Who is to give way: None unless nothing but received requests keeps blocks from the others.

    A block that a load, a reader, a client's session or a step under way has will be free some day.
    """
    if not transfers_with_nixl(scheduler.connector):
        return None
    if scheduler._pause_state.value:  # whoever paused it may go on
        return None
    manager = scheduler.kv_cache_manager
    null = manager.block_pool.null_block.block_id
    waiting = list(chain(scheduler.skipped_waiting, scheduler.waiting))
    if scheduler.policy == SchedulingPolicy.PRIORITY:
        waiting.sort()
    received, held = [], set()
    for request in waiting:
        blocks = set(chain.from_iterable(manager.get_block_ids(request.request_id))) - {null}
        if not _is_received(scheduler, request):
            if blocks and request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
                return None  # a load is under way: the engine polls, and shall look at little
        elif blocks:
            received.append(request)
            held |= blocks
    in_use = manager.block_pool.num_gpu_blocks - 1 - manager.block_pool.get_num_free_blocks()
    if len(held) != in_use or len(received) < 2:  # one alone needs more than there is
        return None
    return received[-1]


def _is_received(scheduler: Scheduler, request: Request) -> bool:
    if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
        # Arrived, and not looked at since: it stands behind one that has no room.
        return request.request_id in scheduler.finished_recving_kv_req_ids
    return request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)

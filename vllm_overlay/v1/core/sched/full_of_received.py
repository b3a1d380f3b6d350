# SPDX-License-Identifier: Apache-2.0
"""Up to 0.30.0: requests that hold received KV, and all of the cache, do not wait for each other.

To run, a received request may need blocks that it has none of yet: for what its draft model
guesses, or for the last token, where what is loaded ends with a block. Loads can take every block
between them, and the first that has arrived then finds none for the rest; those behind it are not
looked at. Nothing runs then, so nothing ends, and no block becomes free: waiting requests are not
preempted. Here the last of them is, once that is certain: a step began with nothing to run, gave
blocks to nobody, and refused somebody; and none has become free since. What was received is lost,
but for what the prefix cache finds again, and it is computed by D.

A step without slots for guesses would be no way out: the draft model writes to them, whoever they
belong to.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from itertools import chain
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.request import RequestStatus

from vllm_overlay.distributed.kv_transfer.fix_counts import Acted, count
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.present import transfers_with_nixl
from vllm_overlay.v1.core.block_pool import null_id
from vllm_overlay.v1.core.sched.requeue import wait_as_preempted

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

_ASKED_FOR_BLOCKS = ("allocate_slots", "can_fit_full_sequence")
"""Methods of `KVCacheManager`; the second from 0.19.0 to 0.20.2, where it is asked first."""


def last_received_gives_way(scheduler: Scheduler) -> None:
    """Free the blocks of a received request when nothing else can.

    Called as `Scheduler.schedule` begins, from inside: plugins look at the code of that method.
    """
    watch: _Watch | None = vars(scheduler).pop("_standstill", None)
    if watch is not None:
        watch.end()
    if scheduler.running or not (scheduler.waiting or scheduler.skipped_waiting):
        return
    last = _last_of_the_stuck(scheduler)
    if last is None:
        return
    if watch is not None and watch.saw_others_wait_in_vain(last):
        scheduler.skipped_waiting.remove_requests([last])
        scheduler.waiting.remove_requests([last])
        wait_as_preempted(scheduler, last)
        count(Acted.RECEIVED_GAVE_WAY)
    scheduler._standstill = _Watch(scheduler.kv_cache_manager)  # type: ignore[attr-defined, unused-ignore]


class _Watch:
    """Who asks for blocks in a step that begins with nothing to run; until the next one does."""

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager
        self._free = manager.block_pool.get_num_free_blocks()
        self._refused: list[str] = []
        self._granted = False
        names = [name for name in _ASKED_FOR_BLOCKS if hasattr(manager, name)]
        self._own = {name: vars(manager).get(name) for name in names}
        for name in names:
            setattr(manager, name, self._noting(getattr(manager, name)))

    def _noting(self, ask: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(ask)
        def noting(request: Request, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as upstream's
            answer = ask(request, *args, **kwargs)
            if answer is None or answer is False:
                self._refused.append(request.request_id)
            elif answer is not True:  # blocks, and no leave to ask for them
                self._granted = True
            return answer

        return noting

    def end(self) -> None:
        """Leave the manager as it was."""
        for name, method in self._own.items():
            if method is None:
                delattr(self._manager, name)
            else:
                setattr(self._manager, name, method)

    def saw_others_wait_in_vain(self, last: Request) -> bool:
        """Whether the step refused blocks to others than `last`, and would again."""
        if self._granted or self._manager.block_pool.get_num_free_blocks() != self._free:
            return False
        return any(req_id != last.request_id for req_id in self._refused)


def _last_of_the_stuck(scheduler: Scheduler) -> Request | None:
    """Who is to give way: None unless nothing but received requests keeps blocks from the others.

    A block that a load, a reader, a client's session or a step under way has will be free some day.
    """
    if not transfers_with_nixl(scheduler.connector):
        return None
    if scheduler._pause_state.value:  # whoever paused it may go on
        return None
    manager = scheduler.kv_cache_manager
    pool, null = manager.block_pool, null_id(manager.block_pool)
    if null is None:  # a plugin's, which may count in a way of its own
        return None
    if any(getattr(pool, "_freed", ())):  # 45357: a step that runs is waited for
        return None
    received, held = set(), set()
    for request in scheduler.requests.values():
        blocks = set(chain.from_iterable(manager.get_block_ids(request.request_id)))
        blocks.discard(null)
        if blocks and request.is_finished():
            return None  # and there may be many, on a P that waits for its readers
        if blocks and _is_received(scheduler, request):
            received.add(request)
            held |= blocks
        elif blocks and request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            return None  # a load is under way: the engine polls, and shall look at little
    in_use = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
    if len(held) != in_use:
        return None
    waiting = list(chain(scheduler.skipped_waiting, scheduler.waiting))
    if scheduler.policy == SchedulingPolicy.PRIORITY:
        waiting.sort()
    return next((request for request in reversed(waiting) if request in received), None)


def _is_received(scheduler: Scheduler, request: Request) -> bool:
    if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
        # Arrived, and not looked at since: it stands behind one that has no room.
        return request.request_id in scheduler.finished_recving_kv_req_ids
    return request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)

# SPDX-License-Identifier: Apache-2.0
"""Up to 0.29.0: what is kept of a request when some of its KV blocks could not be loaded.

Where the cache is one group that keeps every token, it keeps the tokens before the first invalid
block and computes the rest anew. So it is with a window that has all of the prompt in it. With
several groups there is no such point: they need not fail at the same token, and a window or a
recurrent state from further back may be gone. There a request that was loading starts again with
nothing.

It may need more blocks than it had: a window holds all of the prompt until that is computed. So it
waits as one that was preempted, and requests that hold what they received run before it. Behind it
they would hold the blocks that it waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from itertools import chain
from typing import TYPE_CHECKING, TypeAlias
from weakref import ref

from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.request import RequestStatus

from vllm_overlay.v1.core.block_pool import null_id
from vllm_overlay.v1.core.sched.requeue import wait_as_preempted
from vllm_overlay.v1.kv_cache_interface import keeps_all

if TYPE_CHECKING:
    from vllm.v1.core.sched.request_queue import RequestQueue
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import KVCacheSpec
    from vllm.v1.request import Request

# Affected requests, how many of their tokens are computed anew, and blocks to evict.
Affected: TypeAlias = tuple[set[str], int, set[int]]
Update: TypeAlias = Callable[..., Affected]
Select: TypeAlias = "Callable[[Scheduler], RequestQueue | None]"

_set_back: dict[ref[Request], int] = {}
"""Requests that start again, and how often each had been preempted by then.

A plain dict, since each step asks for every waiting request whether it is empty.
"""


def for_any_groups(update: Update) -> Update:
    """Make `Scheduler._update_requests_with_invalid_blocks` right for every KV-cache layout.

    K02. `update`, upstream's own, knows one group and goes on serving that. Requests that load
    while they run (`evict_blocks`) cannot start again in place; upstream does not support them
    with several groups, and those that hold an invalid block still end there.
    """

    @wraps(update)
    def update_any(
        self: Scheduler,
        requests: Iterable[Request],
        invalid_block_ids: set[int],
        num_scheduled_tokens: Mapping[str, int],
        evict_blocks: bool = True,
    ) -> Affected:
        specs = [group.kv_cache_spec for group in self.kv_cache_config.kv_cache_groups]
        if len(specs) > 1 or not keeps_all(specs[0]):
            # The null block pads the lists of every request and holds no tokens.
            null = null_id(self.kv_cache_manager.block_pool)
            invalid_block_ids = {one for one in invalid_block_ids if one != null}
            requests = [r for r in requests if _holds(self, r, invalid_block_ids)]
            if not evict_blocks:
                whole = [r for r in requests if len(specs) == 1 and _is_whole(self, r, specs[0])]
                again, tokens, evict = _start_again(r for r in requests if r not in whole)
                if not whole:
                    return again, tokens, evict
                kept = update(self, whole, invalid_block_ids, num_scheduled_tokens, evict_blocks)
                return again | kept[0], tokens + kept[1], evict | kept[2]
        return update(self, requests, invalid_block_ids, num_scheduled_tokens, evict_blocks)

    return update_any


def _holds(scheduler: Scheduler, request: Request, block_ids: set[int]) -> bool:
    groups = scheduler.kv_cache_manager.get_block_ids(request.request_id)
    return not block_ids.isdisjoint(chain.from_iterable(groups))


def _is_whole(scheduler: Scheduler, request: Request, spec: KVCacheSpec) -> bool:
    """Whether a request's only group has every token of it, though it would forget some later."""
    null = null_id(scheduler.kv_cache_manager.block_pool)
    (block_ids,) = scheduler.kv_cache_manager.get_block_ids(request.request_id)
    return isinstance(spec, SlidingWindowSpec) and null not in block_ids


def _start_again(requests: Iterable[Request]) -> Affected:
    # One that was set back already, by another rank's report, is not affected again.
    affected = [request for request in requests if request.num_computed_tokens]
    tokens = sum(request.num_computed_tokens for request in affected)
    for request in affected:
        request.num_computed_tokens = 0
        _set_back[ref(request, _set_back.pop)] = request.num_preemptions
    return {request.request_id for request in affected}, tokens, set()


def received_first(select: Select) -> Select:
    """Make `Scheduler._select_waiting_queue_for_scheduling` pass over who starts again.

    K02. As long as others wait in `skipped_waiting` that hold what they received, or are about to.
    Stock looks there first but for `policy="priority"`, and stops at the first that has no room.
    """

    @wraps(select)
    def select_received(self: Scheduler) -> RequestQueue | None:
        queue = select(self)
        if not _set_back or queue is None or not _starts_again(self, queue.peek_request()):
            return queue
        _let_wait(self)
        holds = any(request.num_computed_tokens for request in self.skipped_waiting)
        return self.skipped_waiting if holds else self.waiting

    return select_received


def _starts_again(scheduler: Scheduler, request: Request) -> bool:
    """Whether a request was set back, nothing writes to its blocks, and it has not run since."""
    if request.num_computed_tokens or _set_back.get(ref(request)) != request.num_preemptions:
        return False
    receives = request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    return not receives or request.request_id in scheduler.finished_recving_kv_req_ids


def _let_wait(scheduler: Scheduler) -> None:
    """Move who starts again to where preempted requests wait, without blocks or a claim to any."""
    again = [request for request in scheduler.skipped_waiting if _starts_again(scheduler, request)]
    scheduler.skipped_waiting.remove_requests(again)
    for request in reversed(again):
        wait_as_preempted(scheduler, request)

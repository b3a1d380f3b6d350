# SPDX-License-Identifier: Apache-2.0
"""Up to 0.29.0: what is kept of a request when some of its KV blocks could not be loaded.

Where the cache is one group that keeps every token, it keeps the tokens before the first invalid
block and computes the rest anew. With several groups there is no such point: they need not fail
at the same token, and a window or a recurrent state from further back may be gone. There a
request that was loading starts again with nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from itertools import chain
from typing import TYPE_CHECKING, TypeAlias

from vllm.v1.kv_cache_interface import FullAttentionSpec

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

# Affected requests, how many of their tokens are computed anew, and blocks to evict.
Affected: TypeAlias = tuple[set[str], int, set[int]]
Update: TypeAlias = Callable[..., Affected]


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
        if len(specs) > 1 or not isinstance(specs[0], FullAttentionSpec):
            # The null block pads the lists of every request and holds no tokens.
            null = self.kv_cache_manager.block_pool.null_block.block_id
            invalid_block_ids = invalid_block_ids - {null}
            requests = [r for r in requests if _holds(self, r, invalid_block_ids)]
            if not evict_blocks:
                return _start_again(requests)
        return update(self, requests, invalid_block_ids, num_scheduled_tokens, evict_blocks)

    return update_any


def _holds(scheduler: Scheduler, request: Request, block_ids: set[int]) -> bool:
    groups = scheduler.kv_cache_manager.get_block_ids(request.request_id)
    return not block_ids.isdisjoint(chain.from_iterable(groups))


def _start_again(requests: Iterable[Request]) -> Affected:
    # One that was set back already, by another rank's report, is not affected again.
    affected = [request for request in requests if request.num_computed_tokens]
    tokens = sum(request.num_computed_tokens for request in affected)
    for request in affected:
        request.num_computed_tokens = 0
    return {request.request_id for request in affected}, tokens, set()

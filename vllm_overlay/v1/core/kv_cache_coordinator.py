# SPDX-License-Identifier: Apache-2.0
"""Up to 0.23.0: a load takes no block that the prefix cache holds for another group of its request.

The groups of a request get their blocks one after the other: a group claims what the prefix cache
has for it, and then takes free blocks for what is loaded. What the cache has for the next group
counts as free until that claims it, so a block could become two groups' at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    Hits: TypeAlias = tuple[Sequence[KVCacheBlock], ...]
    Allocate: TypeAlias = Callable[[KVCacheCoordinator, str, Hits, int, int], None]


def claims_hits_first(allocate: Allocate) -> Allocate:
    """Have `KVCacheCoordinator.allocate_new_computed_blocks` hold all hits while groups load."""

    @wraps(allocate)
    def wrapper(
        self: KVCacheCoordinator,
        request_id: str,
        new_computed_blocks: Hits,
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        held: list[tuple[Any, KVCacheBlock]] = []
        if num_external_computed_tokens:
            tokens = num_local_computed_tokens + num_external_computed_tokens
            held += _claimed(self, new_computed_blocks, tokens)
        for free, block in held:
            if block.ref_cnt == 0:
                free.remove(block)
            block.ref_cnt += 1
        try:
            allocate(
                self,
                request_id,
                new_computed_blocks,
                num_local_computed_tokens,
                num_external_computed_tokens,
            )
        finally:
            for free, block in held:  # each is its group's by now
                block.ref_cnt -= 1
                if block.ref_cnt == 0:  # but where that fails, or a plugin's makes nothing of hits
                    free.append(block)

    return wrapper


def _claimed(
    coordinator: KVCacheCoordinator, hits: Hits, tokens: int
) -> Iterator[tuple[Any, KVCacheBlock]]:
    """The blocks that the groups are going to claim of their hits, each with the queue that it is
    in while it is free: not those a window has left.

    A plugin's pool may have another way to keep what the prefix cache holds.
    """
    for manager, blocks in zip(coordinator.single_type_managers, hits, strict=True):
        free = getattr(manager.block_pool, "free_block_queue", None)
        if free is not None:
            left = manager.get_num_skipped_tokens(tokens) // manager.block_size
            yield from ((free, block) for block in blocks[left:] if not block.is_null)

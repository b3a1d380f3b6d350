# SPDX-License-Identifier: Apache-2.0
"""0.27.0 to 0.27.1: what the cache has of a prompt is cut to whole blocks, its states too.

Where a connector brings more of a prompt than the prefix cache has, a block of which the cache has
the beginning is left to the connector. Stock then asks each group for as many blocks as attention
has; states may have fewer, as the connector brings the one that counts. 0.28.0 asks no more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING

from vllm.v1.core.single_type_kv_cache_manager import MambaManager

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager


def states_may_have_less(
    truncate: Callable[[KVCacheManager, KVCacheBlocks, int], KVCacheBlocks],
) -> Callable[[KVCacheManager, KVCacheBlocks, int], KVCacheBlocks]:
    """Have `KVCacheManager.truncate_computed_blocks` take what a group of states has."""

    @wraps(truncate)
    def wrapper(
        self: KVCacheManager, blocks: KVCacheBlocks, num_computed_tokens: int
    ) -> KVCacheBlocks:
        null = self.block_pool.null_block
        padded = tuple(
            [*group, *[null] * (num_computed_tokens // manager.block_size - len(group))]
            if isinstance(manager, MambaManager)
            else group
            for group, manager in zip(
                blocks.blocks, self.coordinator.single_type_managers, strict=True
            )
        )
        cut = truncate(self, replace(blocks, blocks=padded), num_computed_tokens)
        return self.create_kv_cache_blocks(
            tuple(
                list(taken[: len(group)])
                for taken, group in zip(cut.blocks, blocks.blocks, strict=True)
            )
        )

    return wrapper

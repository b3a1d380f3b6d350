# SPDX-License-Identifier: Apache-2.0
"""0.30.0 to 0.31.0: what a step leaves behind of the blocks for guesses is no block of a prompt.

Behind the block of the running state a request has one for each guess. A step that goes further
moves them on, but for one that exports a state, for which stock takes others. Those that stay are
then inside of the prompt, where each block is cached as the state after its last token, and nobody
has written them. 0.32.0 moves them on then, too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.single_type_kv_cache_manager import MambaManager

    _Allocate = Callable[[MambaManager, str, int, int], list[KVCacheBlock]]


def leaves_no_scratch(allocate: _Allocate) -> _Allocate:
    """Have `MambaManager.allocate_new_blocks` free what such a step leaves behind."""

    @wraps(allocate)
    def wrapper(
        self: MambaManager, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        if self.mamba_cache_mode != "align" or request_id not in self._allocated_block_reqs:
            return allocate(self, request_id, num_tokens, num_tokens_main_model)
        blocks = self.req_to_blocks[request_id]
        scratch = range(len(blocks) - self.num_speculative_blocks, len(blocks))
        new = allocate(self, request_id, num_tokens, num_tokens_main_model)
        if checkpoint := self._checkpoints.get(request_id):
            _, exported_to = checkpoint  # which may be one of them, and stays
            for at in scratch:
                if at < exported_to:
                    self.block_pool.free_blocks([blocks[at]])
                    blocks[at] = self._null_block
        return new

    return wrapper

# SPDX-License-Identifier: Apache-2.0
"""0.26.0 to 0.32.0: of a block of KV is copied what is there when the copy is made.

Where a prefix may end inside a block, who finds such a part gets a copy of the block, which the
model runner makes before it computes the step. The block is found as soon as the step is decided on
that computes it, also by the requests that follow in the same step. Of recurrent states none is
taken in that step; of attention's blocks those are here, of which it computes the part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
    from vllm.v1.request import Request

    _Manager = SingleTypeKVCacheManager
else:
    _Manager = object


class CopiesWhatIsThere(_Manager):
    """A base of `FullAttentionManager`, which asks it for blocks and has it cache them."""

    def __init__(self, *args: Any, **named: Any) -> None:  # noqa: ANN401 - as the next base
        super().__init__(*args, **named)
        self._begun: dict[int, int] = {}  # block id -> its first token that this step writes

    def cache_blocks(self, request: Request, num_tokens: int, *args: Any, **named: Any) -> None:  # noqa: ANN401 - as the next base
        """Cache blocks, of which the step that is decided on writes the last."""
        if self.block_size == self.block_pool.hash_block_size:  # none is found by a part
            super().cache_blocks(request, num_tokens, *args, **named)
            return
        full = self.num_cached_block.get(request.request_id, 0)
        begin = max(request.num_computed_tokens, full * self.block_size)
        super().cache_blocks(request, num_tokens, *args, **named)
        written = self.req_to_blocks[request.request_id][
            begin // self.block_size : -(-num_tokens // self.block_size)
        ]
        self._begun.update((block.block_id, begin) for block in written)

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        *args: Any,  # noqa: ANN401 - as the next base
        **named: Any,  # noqa: ANN401 - likewise
    ) -> int:
        """Say how many blocks a request needs: more than there are, if it has to wait a step."""
        if new_computed_blocks and num_local_computed_tokens % self.block_size:
            source = new_computed_blocks[-1].block_id
            if self._begun.get(source, num_local_computed_tokens) < num_local_computed_tokens:
                return self.block_pool.num_gpu_blocks + 1
        return super().get_num_blocks_to_allocate(
            request_id,
            num_tokens,
            new_computed_blocks,
            total_computed_tokens,
            num_local_computed_tokens,
            *args,
            **named,
        )

    def new_step_starts(self) -> None:
        """Forget what the step before wrote: it comes before this one's copies."""
        self._begun.clear()
        super().new_step_starts()

# SPDX-License-Identifier: Apache-2.0
"""0.26.0 to 0.32.0: of a block of KV is copied what is there when the copy is made.

Where a prefix may end inside a block, who finds such a part gets a copy of the block, which the
model runner makes before it computes the step. The block is found as soon as the step is decided on
that computes it, also by the requests that follow in the same step. Of recurrent states none is
taken in that step; of attention's blocks those are here, of which it computes the part.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.utils.math_utils import cdiv
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator as _Coordinator
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request
else:
    _Coordinator = object

_Class = TypeVar("_Class", bound=type)


def copies_what_is_there(coordinator: _Class) -> _Class:
    """Have `HybridKVCacheCoordinator` do so: a class of its name that is derived from it."""
    named = {"__module__": coordinator.__module__, "__doc__": coordinator.__doc__}
    return type(coordinator.__name__, (_CopiesWhatIsThere, coordinator), named)  # type: ignore[return-value]


class _CopiesWhatIsThere(_Coordinator):
    # Not in a constructor, which a class that plugins derive from this one may replace.
    @functools.cached_property
    def _begun(self) -> dict[int, int]:
        """For each of attention's blocks that this step writes: the first token that it does."""
        return {}

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Cache a request's blocks, of which the step that is decided on writes the last."""
        if getattr(self, "enable_partial_hash_hits", False):
            for manager in self._of_attention():
                full = manager.num_cached_block.get(request.request_id, 0)
                begin = max(request.num_computed_tokens, full * manager.block_size)
                written = slice(
                    begin // manager.block_size, cdiv(num_computed_tokens, manager.block_size)
                )
                for block in manager.req_to_blocks[request.request_id][written]:
                    self._begun[block.block_id] = begin
        super().cache_blocks(request, num_computed_tokens)

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: tuple[Sequence[KVCacheBlock], ...],
        num_encoder_tokens: int,
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        *args: Any,  # noqa: ANN401 - as the next base
        **named: Any,  # noqa: ANN401 - likewise
    ) -> int:
        """Say how many blocks a request needs: more than there are, if it has to wait a step."""
        if self._begun and any(new_computed_blocks):
            for manager in self._of_attention():
                found = new_computed_blocks[manager.kv_cache_group_id]
                if found and num_local_computed_tokens % manager.block_size:
                    begin = self._begun.get(found[-1].block_id, num_local_computed_tokens)
                    if begin < num_local_computed_tokens:
                        return self.block_pool.num_gpu_blocks + 1
        return super().get_num_blocks_to_allocate(
            request_id,
            num_tokens,
            new_computed_blocks,
            num_encoder_tokens,
            total_computed_tokens,
            num_local_computed_tokens,
            *args,
            **named,
        )

    def new_step_starts(self) -> None:
        """Forget what the step before wrote: it comes before this one's copies."""
        self._begun.clear()
        super().new_step_starts()

    def _of_attention(self) -> list[FullAttentionManager]:
        managers = self.single_type_managers
        return [one for one in managers if isinstance(one, FullAttentionManager)]

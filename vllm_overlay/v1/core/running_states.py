# SPDX-License-Identifier: Apache-2.0
"""0.26.0 to 0.27.1: a loaded state is kept for later where the model runner does not go on from it.

Where a state is cached by a part of a block, the next step has it copied. A new request goes on
from the copy; one that runs goes on where it is, for its model runner only hears of blocks that
come behind those it has. One that was loaded and needs no block for its first step counts as new
in its second there: the copy is taken for its state, and its state's block is given to others.
0.28.0 has it run from its first step on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.single_type_kv_cache_manager import MambaManager

    _Allocate = Callable[..., list[KVCacheBlock]]


def runs_from_its_first_step_on(allocate: _Allocate) -> _Allocate:
    """Have `MambaManager.allocate_new_blocks` count a request as running that needs no block."""

    @wraps(allocate)
    def wrapper(
        self: MambaManager,
        request_id: str,
        *args: Any,  # noqa: ANN401 - as it is called
        **named: Any,  # noqa: ANN401 - likewise
    ) -> list[KVCacheBlock]:
        blocks = allocate(self, request_id, *args, **named)
        if self.mamba_cache_mode == "align":
            self._allocated_block_reqs.add(request_id)
        return blocks

    return wrapper

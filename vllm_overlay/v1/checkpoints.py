# SPDX-License-Identifier: Apache-2.0
"""From 0.30.0 on: a part of a prompt that begins inside a block of states exports none.

Layers that export a state from within a step need no part of a prompt to end there, so one that
exports runs on to the prompt's end. The block it begins in then keeps the state it has begun with,
and is cached as that after the block. What exports none ends with its block, where it begins inside
one. 0.29.0 had it so.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps


def begins_with_a_block(is_valid: Callable[..., bool]) -> Callable[..., bool]:
    """Have `is_mamba_prefill_checkpoint_valid` ask for that, too.

    The scheduler, the manager of blocks and the layers all go by its answer.
    """

    @wraps(is_valid)
    def wrapper(
        query_start: int,
        query_end: int,
        checkpoint_position: int,
        hash_block_size: int,
        mamba_block_size: int,
        checkpoint_alignment: int | None,
    ) -> bool:
        return query_start % mamba_block_size == 0 and is_valid(
            query_start,
            query_end,
            checkpoint_position,
            hash_block_size,
            mamba_block_size,
            checkpoint_alignment,
        )

    return wrapper

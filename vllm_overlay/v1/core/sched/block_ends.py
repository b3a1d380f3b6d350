# SPDX-License-Identifier: Apache-2.0
"""Up to 0.26.0: a part of a prompt that begins inside a block of states ends with it, or before.

In mode "align" a block of recurrent states holds one, that after the last token that a step
computed there, and a full block is cached as that after its last token. So nothing may run on from
inside a block into the next. Stock sees to it up to the last block that a prompt's next one may
hit; a draft model has it take a block less, where a step's tokens then may run out inside a block.
So they do where what was loaded ends in one. 0.27.0 ends such a part as this does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request


def ends_with_its_block(split: Callable[..., int]) -> Callable[..., int]:
    """Have `Scheduler._mamba_block_aligned_split` leave the next block to the next step."""

    @wraps(split)
    def wrapper(
        self: Scheduler,
        request: Request,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        *more: int,
        **named: int,
    ) -> int:
        loaded = num_new_local_computed_tokens, num_external_computed_tokens
        tokens = split(self, request, num_new_tokens, *loaded, *more, **named)
        start = request.num_computed_tokens + sum(loaded)
        if start >= request.num_tokens - 1:
            return tokens  # of an answer, or a prompt's last with its places for guesses: decodes
        left = -start % self.cache_config.block_size
        return min(tokens, left) if left else tokens

    return wrapper

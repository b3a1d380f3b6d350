# SPDX-License-Identifier: Apache-2.0
"""0.25.0 to 0.28.0: a request that joins gets places for guesses where they fit, or none.

The last token of a prompt that was received comes with as many places for guesses as running
requests have, so that all rows of a step are alike. Which positions the places have is not looked
at: they may lie behind the longest sequence that the model takes, and a hybrid whose states are
cached at the ends of blocks computes a row up to such an end only, with all of its places named.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request


def guesses_fit(scheduler: Scheduler, request: Request, num_computed_tokens: int) -> bool:
    """Say whether the last token of a request can be computed with places for guesses.

    Args:
        scheduler: of the engine.
        request: that joins.
        num_computed_tokens: all of its tokens but the last.
    """
    row = 1 + scheduler.num_spec_tokens
    sampled = getattr(scheduler, "num_sampled_tokens_per_step", 1)  # 0.25.x: always one
    if num_computed_tokens + row + sampled > scheduler.max_model_len:
        return False
    if 0 < scheduler.scheduler_config.long_prefill_token_threshold < row:
        return False
    if not scheduler.need_mamba_block_aligned_split:
        return True
    begun = num_computed_tokens - request.num_computed_tokens
    return scheduler._mamba_block_aligned_split(request, row, begun) == row

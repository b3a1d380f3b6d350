# SPDX-License-Identifier: Apache-2.0
"""0.25.0 to 0.29.0: a prompt's last token beside guesses goes to the kernels that can undo those.

From 0.25.0 on the scheduler gives the last token of a prompt as many places for guesses as running
requests have, so that one graph serves them all. What is in them is nothing of the request's. The
kernels for prompts keep the state after all of it, those for guesses the state after each token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata


def with_tails_as_guesses(
    common: CommonAttentionMetadata, drafts: torch.Tensor | None
) -> CommonAttentionMetadata:
    """Return a step's metadata in which the last token of a prompt beside guesses is none of one.

    Args:
        common: of all requests of the step. Those that have a state already count.
        drafts: (requests,) int32 on the CPU; how many guesses a request has where it has one token
            besides, else -1. None where nothing is guessed.
    """
    prefilling, ends = common.is_prefilling, common.seq_lens_cpu_upper_bound
    if drafts is None or prefilling is None or ends is None:
        return common
    queries = torch.diff(common.query_start_loc_cpu)
    tails = prefilling & (drafts > 0) & (queries == drafts + 1) & (ends > queries)
    return common.replace(is_prefilling=prefilling & ~tails) if tails.any() else common

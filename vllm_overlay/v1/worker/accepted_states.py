# SPDX-License-Identifier: Apache-2.0
"""0.22.0 to 0.31.0: in a step without guesses, too, Mamba-2 layers are told where the states are.

With a state for each block (`mamba_cache_mode` "all") and speculation a step leaves one state for
each token that it computes, in a block each. Which of them is the request's hangs on how many
guesses were right: the next step is told the first block and that number. The runner tells it in
steps with guesses alone, but their states lie there also when nobody guesses in the next step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadataBuilder

if TYPE_CHECKING:
    from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


def with_accepted_states(
    runner: GPUModelRunner,
    builder: AttentionMetadataBuilder[Any],
    common: CommonAttentionMetadata,
    told: dict[str, Any],
    ubatch: int | None,
) -> tuple[CommonAttentionMetadata, dict[str, Any]]:
    """Return what `builder` is handed, and told, of a step.

    Args:
        runner: whose buffers know of each request, in the order of the batch, where its states are.
        builder: of one group of layers; all but those of Mamba-2 are handed what they were.
        common: of all requests of the step, or of one of its parts.
        told: what the runner tells the builder by itself; empty where nobody guesses.
        ubatch: which part of the step; None where it is one. The buffers are those of a whole one.
    """
    blocks, prefilling = runner.mamba_prev_last_scheduled_idx, common.is_prefilling
    if told or blocks is None or ubatch is not None or prefilling is None:
        return common, told
    if not isinstance(builder, Mamba2AttentionMetadataBuilder):
        return common, told
    # Who is told what was accepted takes a few tokens for one and its guesses, whose states are
    # kept apart. Here they are tokens that a preempted request computes again.
    again = torch.diff(common.query_start_loc_cpu) > 1
    return common.replace(is_prefilling=prefilling | again), {
        "num_accepted_tokens": runner.num_accepted_tokens.gpu[: common.num_reqs],
        "prev_last_scheduled_idx": blocks.gpu[: common.num_reqs],
    }

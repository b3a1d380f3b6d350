# SPDX-License-Identifier: Apache-2.0
"""0.19.0 to 0.21.0: a prompt's last token, which D computes, is a decode to Mamba layers.

Of a hybrid P computes all of a prompt but its last token, and D goes on from there. In a step in
which each request has one token the runner replays a graph of decodes. That graph reads the states
whose blocks it was told last, and it is told only of steps without a prompt's row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.attention.backends.mamba_attn import BaseMambaAttentionMetadataBuilder


def with_last_tokens_as_decodes(
    builder: BaseMambaAttentionMetadataBuilder[Any], common: CommonAttentionMetadata
) -> CommonAttentionMetadata:
    """Return a step's metadata in which a single token after others of its prompt is none of one.

    Only where nobody guesses: with guesses no graph has rows of one token, and the layers want to
    know of each decode how many guesses it accepted.

    Args:
        builder: of layers with states.
        common: of all requests of the step, those that decode first, then single tokens of prompts
            of which there is a state, then the rest: the runner's own order.
    """
    prompts, ends = common.is_prefilling, common._seq_lens_cpu  # there where nobody guesses
    if builder.use_spec_decode or prompts is None or ends is None:
        return common
    goes_on = prompts & (torch.diff(common.query_start_loc_cpu) == 1) & (ends > 1)
    return common.replace(is_prefilling=prompts & ~goes_on) if goes_on.any() else common

# SPDX-License-Identifier: Apache-2.0
"""0.19.0 to 0.30.0: a prompt whose first step is one token goes on from nothing.

The metadata of gated delta nets counts each row of one token, and each with places for guesses, as
a decode, which reads the state in its request's block. Of a first token nothing has written one:
what lies there is of whoever had the block before. So that is zeroed, which is what a first state
is. It stays a decode's row: CUDA graphs of decodes hang on that.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from vllm_overlay.v1.worker.dummy_steps import are_of_vllm, is_nobodys

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata

_Builder = TypeVar("_Builder", bound=type)


def begins_from_nothing(builder: _Builder) -> _Builder:
    """Have a metadata builder of recurrent layers zero states that a step reads and nobody wrote.

    On the device's queue, before the step. A class that builds as its base does needs no more
    than that.
    """
    init, build = builder.__init__, builder.build  # type: ignore[misc, attr-defined]

    @functools.wraps(init)
    def with_layers(
        self: Any,  # noqa: ANN401 - the builder's
        kv_cache_spec: Any,  # noqa: ANN401
        layer_names: list[str],
        *args: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        init(self, kv_cache_spec, layer_names, *args, **kwargs)
        self.layer_names = layer_names  # its own constructor does not keep them

    @functools.wraps(build)
    def from_nothing(
        self: Any,  # noqa: ANN401
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        num_accepted_tokens: torch.Tensor | None = None,
        num_decode_draft_tokens_cpu: torch.Tensor | None = None,
        *args: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        _zero_first_states(self, common_attn_metadata, num_decode_draft_tokens_cpu)
        return build(
            self,
            common_prefix_len,
            common_attn_metadata,
            num_accepted_tokens,
            num_decode_draft_tokens_cpu,
            *args,
            **kwargs,
        )

    builder.__init__ = with_layers  # type: ignore[misc]
    builder.build = from_nothing  # type: ignore[attr-defined]
    return builder


def _zero_first_states(
    builder: Any,  # noqa: ANN401
    common: CommonAttentionMetadata,
    guesses: torch.Tensor | None,
) -> None:
    """Zero the states of rows that are one token, the first of their request.

    From 0.25.0 on places for guesses may come with it. `guesses` has how many, on the host, in
    rows that are one token and those; less than 1 in others.
    """
    nobodys = is_nobodys(builder)
    prompts = common.is_prefilling  # not a capture's rows
    if nobodys or prompts is None or not prompts.any():  # mostly; it is asked in each step
        return
    ends = getattr(common, "seq_lens_cpu_upper_bound", None)  # from 0.20.0 on; exact for prompts
    if ends is None:
        # Up to 0.29.0; up to 0.19.1, where there is nothing else, none with asynchronous guesses.
        ends = getattr(common, "_seq_lens_cpu", None)
    if ends is None:
        return
    lengths = torch.diff(common.query_start_loc_cpu)
    one = lengths == 1
    if guesses is not None:
        one = one | (guesses > 0)
    rows = torch.nonzero(one & (ends == lengths) & prompts).flatten()
    if not len(rows) or not are_of_vllm(builder.vllm_config):  # a row may be one of a dummy step
        return
    # The first block in each mode: of one token there is no later one. The host waits for nothing.
    table = common.block_table_tensor
    blocks = table[rows.to(table.device, non_blocking=True), 0].long()
    layers = builder.vllm_config.compilation_config.static_forward_context
    for name in builder.layer_names:
        for part in layers[name].kv_cache:
            part.index_fill_(0, blocks, 0)

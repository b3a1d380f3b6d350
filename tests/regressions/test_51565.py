"""51565: a prompt whose first step is one token starts from nothing, not from another's state.

Of a hybrid with gated delta nets P leaves a prompt's last token to D, so a prompt of two tokens is
such a step on P; on each engine also a prompt of which one token had room in the first step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from vllm.triton_utils import triton
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import gdn_attn

from tests.support.decode_engine import DecodeEngine
from tests.support.harness import building
from tests.support.hybrid_engine import engine_of

BEFORE = 7.0
"""What lies in every block of states."""

CASES = [
    {"first": (0, 1)},
    {"runs": (40, 1), "first": (0, 1)},
    {"runs": (40, 1), "first": (0, 1), "prompt": (0, 12)},
    {"received": (16, 1), "first": (0, 1), "again": (0, 1)},
]
"""Rows of a step: tokens that are computed already, and those of the step."""


@building("what a gated delta net is told of a step")
def told_of(
    rows: Sequence[tuple[int, int]],
    builder_class: type[gdn_attn.GDNAttentionMetadataBuilder] = (
        gdn_attn.GDNAttentionMetadataBuilder
    ),
    **changes: Any,  # noqa: ANN401 - of fields
) -> tuple[Any, Sequence[torch.Tensor]]:
    """Make it as the model runner does, but for `changes`.

    Returns:
        the metadata, and the parts of the layer's states, the blocks first.
    """
    engine = engine_of(DecodeEngine, mode="none")
    config = engine.worker.vllm_config
    [group] = [
        g for g in engine.worker.kv_cache_config.kv_cache_groups if "group1" in g.layer_names[0]
    ]
    parts = [torch.full((64, 3, 4), BEFORE), torch.full((64, 2, 2, 2), BEFORE)]
    layers = {name: SimpleNamespace(kv_cache=parts) for name in group.layer_names}
    config.compilation_config.static_forward_context.update(layers)
    computed, queries = (list(one) for one in zip(*rows, strict=True))
    ends = torch.tensor([done + n for done, n in rows], dtype=torch.int32)
    starts = torch.tensor([0, *queries]).cumsum(0).to(torch.int32)
    fields: dict[str, Any] = {
        "query_start_loc": starts,
        "query_start_loc_cpu": starts,
        "seq_lens": ends,
        "_seq_lens_cpu": ends,
        "seq_lens_cpu_upper_bound": ends,
        "_num_computed_tokens_cpu": torch.tensor(computed, dtype=torch.int32),
        "num_reqs": len(rows),
        "num_actual_tokens": sum(queries),
        "max_query_len": max(queries),
        "max_seq_len": int(ends.max()),
        "block_table_tensor": torch.arange(1, 1 + len(rows), dtype=torch.int32).view(-1, 1),
        "slot_mapping": torch.zeros(sum(queries), dtype=torch.int64),
        "is_prefilling": torch.tensor([done < 20 for done in computed]),
        **changes,
    }
    known = {field.name for field in dataclasses.fields(CommonAttentionMetadata)}
    common = CommonAttentionMetadata(**{k: v for k, v in fields.items() if k in known})
    builder = builder_class(group.kv_cache_spec, group.layer_names, config, torch.device("cpu"))
    with (
        # Without a device triton is a stand-in, and what only kernels want to know is not there.
        mock.patch.object(triton, "cdiv", lambda a, b: -(-a // b), create=True),
        mock.patch.object(gdn_attn, "compute_causal_conv1d_metadata", lambda *_, **__: [None] * 3),
    ):
        return builder.build(0, common), parts


def begins_with(told: Any, parts: Sequence[torch.Tensor], row: int) -> float:  # noqa: ANN401
    """What the state is from which the layer goes on in a row."""
    if row >= told.num_decodes and not told.has_initial_state[row]:
        return 0
    block = int(told.non_spec_state_indices_tensor[row])
    [[value]] = {tuple(part[block].unique().tolist()) for part in parts}
    return float(value)


@pytest.mark.parametrize("rows", CASES, ids=" ".join)
def test_a_first_token_begins_with_nothing(rows: dict[str, tuple[int, int]]) -> None:
    told, parts = told_of(list(rows.values()))
    for number, (computed, _) in enumerate(rows.values()):
        assert begins_with(told, parts, number) == (BEFORE if computed else 0)

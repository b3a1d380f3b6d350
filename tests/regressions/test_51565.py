"""51565: a prompt whose first step is one token starts from nothing, not from another's state.

Of a hybrid with gated delta nets P leaves a prompt's last token to D, so a prompt of two tokens is
such a step on P; on each engine also a prompt of which one token had room in the first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends import gdn_attn

from tests.support.decode_engine import DecodeEngine
from tests.support.harness import building
from tests.support.hybrid_engine import engine_of, states_of
from tests.support.step_rows import step, without_kernels

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
    group = states_of(engine)
    parts = [torch.full((64, 3, 4), BEFORE), torch.full((64, 2, 2, 2), BEFORE)]
    layers = {name: SimpleNamespace(kv_cache=parts) for name in group.layer_names}
    config.compilation_config.static_forward_context.update(layers)
    common = step(*((done, n, done < 20) for done, n in rows), **changes)
    builder = builder_class(group.kv_cache_spec, group.layer_names, config, torch.device("cpu"))
    with without_kernels(builder):
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

"""Who is told where the accepted states are, and that all others are handed what they were."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
from vllm.v1.attention.backends.mamba1_attn import Mamba1AttentionMetadataBuilder
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadataBuilder
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from tests.support.step_rows import step

pytest.importorskip("vllm_overlay.v1.worker.accepted_states", reason="0.22.0 to 0.31.0")
from vllm_overlay.v1.worker.accepted_states import with_accepted_states

_Row = tuple[int, int, bool]
"""Tokens computed before, tokens of the step, and whether they are of a prompt."""


STEP = step((20, 1, False), (32, 2, False), (39, 1, True), (0, 9, True))
GUESSED = {"num_accepted_tokens": torch.tensor([3, 1, 1, 1])}


def runner(*, each: bool = True) -> Any:  # noqa: ANN401 - stands in for a model runner
    """One with room for more requests than a step has."""
    blocks = SimpleNamespace(gpu=torch.tensor([2, -1, -1, -1, 7, 7]))
    return SimpleNamespace(
        num_accepted_tokens=SimpleNamespace(gpu=torch.tensor([3, 1, 1, 1, 9, 9])),
        mamba_prev_last_scheduled_idx=blocks if each else None,
    )


def of(builder: type) -> Any:  # noqa: ANN401 - one of the release's builders
    return object.__new__(builder)


MAMBA2 = of(Mamba2AttentionMetadataBuilder)


def test_without_guesses_it_is_told_of_each_request() -> None:
    common, told = with_accepted_states(runner(), MAMBA2, STEP, {}, None)
    assert {name: values.tolist() for name, values in told.items()} == {
        "num_accepted_tokens": [3, 1, 1, 1],
        "prev_last_scheduled_idx": [2, -1, -1, -1],
    }
    assert common.is_prefilling is not None
    assert common.is_prefilling.tolist() == [False, True, True, True]


def test_what_is_handed_in_stays_as_it_is() -> None:
    """Layers of other kinds, and who guesses next, get it, too."""
    common, _ = with_accepted_states(runner(), MAMBA2, STEP, {}, None)
    assert STEP.is_prefilling is not None
    assert STEP.is_prefilling.tolist() == [False, False, True, True]
    differ = [
        field.name
        for field in dataclasses.fields(common)
        if getattr(common, field.name) is not getattr(STEP, field.name)
    ]
    assert differ == ["is_prefilling"]


def test_the_same_rows_are_a_prompts_as_where_nothing_is_accepted() -> None:
    """Also where one token of a request stands behind some that another computes again."""

    def split(common: CommonAttentionMetadata, threshold: int) -> tuple[int, int, int, int]:
        return split_decodes_and_prefills(
            common, decode_threshold=threshold, treat_short_extends_as_decodes=False
        )

    kinds = [(20, 1, False), (32, 3, False), (33, 9, False), (39, 1, True), (16, 4, True)]
    for rows in itertools.product(kinds, repeat=3):
        before = step(*rows)
        after, _ = with_accepted_states(runner(), MAMBA2, before, {}, None)
        assert split(after, 4) == split(before, 1)


@pytest.mark.parametrize(
    ("model", "builder", "told", "ubatch"),
    [
        pytest.param(runner(), MAMBA2, GUESSED, None, id="a step with guesses"),
        pytest.param(runner(each=False), MAMBA2, {}, None, id="another mode, or no speculation"),
        pytest.param(runner(), MAMBA2, {}, 0, id="a part of a step"),
        pytest.param(runner(), of(GDNAttentionMetadataBuilder), {}, None, id="GDN"),
        pytest.param(runner(), of(Mamba1AttentionMetadataBuilder), {}, None, id="Mamba-1"),
    ],
)
def test_all_others_are_handed_what_they_were(
    model: Any,  # noqa: ANN401 - see `runner`
    builder: Any,  # noqa: ANN401 - see `of`
    told: dict[str, Any],
    ubatch: int | None,
) -> None:
    common, then = with_accepted_states(model, builder, STEP, told, ubatch)
    assert common is STEP
    assert then is told


def test_metadata_that_says_of_no_row_what_it_is_of_is_handed_on() -> None:
    without = STEP.replace(is_prefilling=None)
    told: dict[str, Any] = {}
    common, then = with_accepted_states(runner(), MAMBA2, without, told, None)
    assert common is without
    assert then is told

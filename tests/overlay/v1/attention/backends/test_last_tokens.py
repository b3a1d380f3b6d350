"""Which rows of a step become decodes, and that nothing else is changed."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from tests.support.decode_graphs import MAMBA2, Row, graph_reads
from tests.support.step_rows import step

pytest.importorskip("vllm_overlay.v1.attention.backends.last_tokens", reason="0.19.0 to 0.21.0")
from vllm_overlay.v1.attention.backends.last_tokens import with_last_tokens_as_decodes

BUILDER: Any = SimpleNamespace(use_spec_decode=False)
RUNS, LAST, FIRST, REST = (45, 1, False), (39, 1, True), (0, 1, True), (16, 9, True)


def prompts(*rows: tuple[int, int, bool]) -> list[bool]:
    """Whose rows count as those of prompts."""
    left = with_last_tokens_as_decodes(BUILDER, step(*rows)).is_prefilling
    assert left is not None
    return left.tolist()


def test_a_single_token_behind_others_is_none_of_a_prompt() -> None:
    assert prompts(LAST) == [False]
    assert prompts((1, 1, True)) == [False]
    assert prompts(RUNS, LAST, LAST) == [False, False, False]


@pytest.mark.parametrize("row", [FIRST, REST, (0, 9, True), (39, 2, True), (39, 0, True)])
def test_all_other_rows_of_prompts_stay_what_they_are(row: tuple[int, int, bool]) -> None:
    assert prompts(RUNS, LAST, row) == [False, False, True]


def test_what_is_handed_in_stays_as_it_is() -> None:
    """Layers of other kinds get it, too."""
    common = step(RUNS, LAST, REST)
    left = with_last_tokens_as_decodes(BUILDER, common)
    assert common.is_prefilling is not None
    assert common.is_prefilling.tolist() == [False, True, True]
    differ = [
        field.name
        for field in dataclasses.fields(left)
        if getattr(left, field.name) is not getattr(common, field.name)
    ]
    assert differ == ["is_prefilling"]


@pytest.mark.parametrize("rows", [[RUNS, RUNS], [FIRST], [RUNS, REST]])
def test_a_step_without_such_a_row_is_handed_on(rows: list[tuple[int, int, bool]]) -> None:
    common = step(*rows)
    assert with_last_tokens_as_decodes(BUILDER, common) is common


@pytest.mark.parametrize(
    ("builder", "common"),
    [
        (SimpleNamespace(use_spec_decode=True), step(LAST)),
        (BUILDER, step(LAST, is_prefilling=None)),
        (BUILDER, step(LAST, _seq_lens_cpu=None)),
    ],
    ids=["with guesses", "without who is a prompt", "without lengths on the host"],
)
def test_elsewhere_it_is_as_on_stock(builder: Any, common: CommonAttentionMetadata) -> None:  # noqa: ANN401
    assert with_last_tokens_as_decodes(builder, common) is common


def test_in_the_runners_order_decodes_stay_in_front() -> None:
    """So that the layers split the step where it becomes one of prompts."""
    for size in range(1, 5):
        for rows in itertools.combinations_with_replacement([RUNS, LAST, REST, FIRST], size):
            common = with_last_tokens_as_decodes(BUILDER, step(*rows))
            decodes, *_ = split_decodes_and_prefills(common, treat_short_extends_as_decodes=False)
            assert decodes == sum(row in (RUNS, LAST) for row in rows)


def test_the_graph_is_kept() -> None:
    for rows in ([Row(39, 40)], [Row(45, 40), Row(39, 40)], [Row(45, 40), Row(45, 40)]):
        assert graph_reads(MAMBA2, *rows) == list(range(1, 1 + len(rows)))


def test_a_row_that_is_none_counts_for_none() -> None:
    """The runner pads a step for its graph with rows without tokens."""
    assert prompts(LAST, (0, 0, False)) == [False, False]

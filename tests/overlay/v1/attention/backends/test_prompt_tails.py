"""Which rows of a step are taken out of the prompts', and that nothing else is changed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from tests.support.step_rows import step

pytest.importorskip("vllm_overlay.v1.attention.backends.prompt_tails", reason="0.25.0 to 0.29.0")
from vllm_overlay.v1.attention.backends.prompt_tails import with_tails_as_guesses


def prompts(common: CommonAttentionMetadata, *drafts: int) -> list[bool]:
    """Whose rows count as those of prompts, of requests with so many guesses."""
    left = with_tails_as_guesses(common, torch.tensor(drafts, dtype=torch.int32)).is_prefilling
    assert left is not None
    return left.tolist()


def test_a_tail_beside_guesses_is_none_of_a_prompt() -> None:
    assert prompts(step((20, 4, False), (39, 4, True)), 3, 3) == [False, False]
    assert prompts(step((39, 2, True)), 1) == [False]


@pytest.mark.parametrize(
    ("row", "draft"),
    [
        ((39, 4, True), -1),  # four tokens of the prompt
        ((36, 5, True), 3),  # two of them, and guesses
        ((0, 4, True), 3),  # a prompt of one token: there is no state before it
        ((39, 1, True), -1),  # nothing is guessed: the release's own business
        ((39, 1, True), 0),
    ],
)
def test_all_other_rows_of_prompts_stay_what_they_are(
    row: tuple[int, int, bool], draft: int
) -> None:
    assert prompts(step((20, 4, False), row), 3, draft) == [False, True]


def test_what_has_no_such_row_is_handed_on() -> None:
    common = step((20, 4, False), (30, 9, True))
    assert with_tails_as_guesses(common, torch.tensor([3, -1])) is common
    assert with_tails_as_guesses(common, None) is common
    for missing in ("is_prefilling", "seq_lens_cpu_upper_bound"):
        without = common.replace(**{missing: None})
        assert with_tails_as_guesses(without, torch.tensor([3, 3])) is without


def test_what_is_handed_in_stays_as_it_is() -> None:
    """Layers of other kinds get it, too."""
    common = step((39, 4, True))
    changed = with_tails_as_guesses(common, torch.tensor([3]))
    assert common.is_prefilling is not None
    assert common.is_prefilling.tolist() == [True]
    differ = [
        field.name
        for field in dataclasses.fields(common)
        if not _same(getattr(common, field.name), getattr(changed, field.name))
    ]
    assert differ == ["is_prefilling"]


def _same(one: Any, other: Any) -> bool:  # noqa: ANN401 - of any field
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)

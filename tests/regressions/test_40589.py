"""40589: a rank whose request nears the model's length takes part in the other ranks' drafting."""

from __future__ import annotations

import pytest

from tests.support.drafting_rank import GUESSES, LENGTH, DraftingRank


@pytest.mark.parametrize("padded", [True, False], ids=["padded", "not padded"])
@pytest.mark.parametrize("length", [LENGTH - GUESSES + 1, LENGTH])
def test_no_rank_waits_for_another_s_drafter(padded: bool, length: int) -> None:
    rank, other = DraftingRank(padded=padded), DraftingRank(padded=padded)
    rank.step(length)
    other.step(length // 2)
    assert other.drafted == 1
    assert rank.drafted + rank.joined == 1, "the other rank's drafter waits for this one"

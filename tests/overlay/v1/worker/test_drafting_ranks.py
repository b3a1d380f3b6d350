"""When a rank takes part in the drafting of others, and when it is left alone."""

from __future__ import annotations

import pytest

from tests.support.drafting_rank import GUESSES, LENGTH, DraftingRank

pytest.importorskip("vllm_overlay.v1.worker.drafting_ranks", reason="up to 0.24.0")


@pytest.mark.parametrize("method", ["eagle", "draft_model", "extract_hidden_states"])
def test_whatever_drafts_with_a_model_joins_once(method: str) -> None:
    rank = DraftingRank(method=method)
    rank.step(LENGTH)
    assert (rank.drafted, rank.joined) == (0, 1)
    rank.runner.drafter.dummy_run.assert_called_once_with(num_tokens=1)


def test_a_rank_that_drafts_does_not_join_as_well() -> None:
    rank = DraftingRank()
    rank.step(LENGTH - GUESSES)
    assert (rank.drafted, rank.joined) == (1, 0)


def test_guesses_without_a_model_need_nobody() -> None:
    rank = DraftingRank(method="ngram")
    rank.step(LENGTH)
    assert (rank.drafted, rank.joined) == (0, 0)


def test_a_single_rank_computes_nothing_more() -> None:
    rank = DraftingRank(ranks=1)
    rank.step(LENGTH)
    assert (rank.drafted, rank.joined) == (0, 0)

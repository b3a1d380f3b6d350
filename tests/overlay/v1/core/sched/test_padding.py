"""Where a row has places for guesses as on stock, and where it has none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

padding = pytest.importorskip("vllm_overlay.v1.core.sched.padding", reason="0.25.0 to 0.28.0")


def scheduler(**different: Any) -> SimpleNamespace:  # noqa: ANN401 - of any type
    """What is asked of a scheduler that guesses three tokens, of sequences of 100 at the most."""
    known = {
        "num_spec_tokens": 3,
        "num_sampled_tokens_per_step": 1,
        "max_model_len": 100,
        "scheduler_config": SimpleNamespace(long_prefill_token_threshold=0),
        "need_mamba_block_aligned_split": False,
    }
    return SimpleNamespace(**known | different)


def test_up_to_the_last_place_of_the_longest_sequence() -> None:
    request = SimpleNamespace(num_computed_tokens=0)
    assert padding.guesses_fit(scheduler(), request, 95)  # 95 to 98, and 99 is sampled
    assert not padding.guesses_fit(scheduler(), request, 96)


def test_a_model_that_samples_none() -> None:
    request = SimpleNamespace(num_computed_tokens=0)
    assert padding.guesses_fit(scheduler(num_sampled_tokens_per_step=0), request, 96)


def test_a_release_that_does_not_say_how_many_are_sampled() -> None:
    older = scheduler()
    del older.num_sampled_tokens_per_step
    request = SimpleNamespace(num_computed_tokens=0)
    assert padding.guesses_fit(older, request, 95)
    assert not padding.guesses_fit(older, request, 96)


@pytest.mark.parametrize(("threshold", "fits"), [(0, True), (1, False), (3, False), (4, True)])
def test_a_threshold_that_cuts_the_row(threshold: int, fits: bool) -> None:
    config = SimpleNamespace(long_prefill_token_threshold=threshold)
    asked = scheduler(scheduler_config=config)
    request = SimpleNamespace(num_computed_tokens=0)
    assert padding.guesses_fit(asked, request, 10) is fits


@pytest.mark.parametrize("computed", [0, 10])
def test_a_split_is_asked_about_the_whole_row_from_where_it_begins(computed: int) -> None:
    asked = []

    def split(request: object, tokens: int, begun: int) -> int:
        asked.append((request, tokens, begun))
        return answer

    request = SimpleNamespace(num_computed_tokens=computed)
    hybrid = scheduler(need_mamba_block_aligned_split=True, _mamba_block_aligned_split=split)
    for answer in (4, 2):
        assert padding.guesses_fit(hybrid, request, 10) is (answer == 4)
    assert asked == [(request, 4, 10 - computed)] * 2

"""What a window may leave while guesses are in flight, by what the scheduler knows of them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.decode_engine import DecodeEngine
from tests.support.nixl_worker import GroupKind

module = pytest.importorskip("vllm_overlay.v1.core.rejected_guesses", reason="up to 0.25.1")

COMPUTED = 40


def surely(
    placeholders: int, guesses: int, groups: Sequence[GroupKind] = ("full", "sliding")
) -> int:
    """Of `COMPUTED` tokens, for a request with so many places for what steps in flight yield."""
    manager = DecodeEngine(groups=groups).scheduler.kv_cache_manager
    request: Any = SimpleNamespace(
        num_output_placeholders=placeholders, spec_token_ids=[-1] * guesses
    )
    kept: int = module.surely_computed(manager, request, COMPUTED)
    return kept


def test_guesses_in_flight_do_not_count() -> None:
    assert surely(1 + 3, guesses=3) == COMPUTED - 3
    assert surely(1 + 1, guesses=3) == COMPUTED - 1  # the step before was given fewer


@pytest.mark.parametrize("placeholders", [0, 1])
def test_all_counts_with_none_in_flight(placeholders: int) -> None:
    assert surely(placeholders, guesses=3) == COMPUTED


def test_all_counts_where_nothing_is_guessed() -> None:
    """With pipeline stages and async scheduling several steps are in flight for a request."""
    assert surely(3, guesses=0) == COMPUTED


def test_all_counts_beside_states() -> None:
    assert surely(1 + 3, guesses=3, groups=("sliding", "mamba")) == COMPUTED


def test_no_window_begins_before_the_first_token() -> None:
    assert surely(1 + COMPUTED + 3, guesses=3) == 0

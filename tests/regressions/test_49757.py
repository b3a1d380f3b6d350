"""49757: the dummy steps of an idle rank write no state into a block that a request had.

A request that came since may have that block, and a connector may be loading its state there.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.decode_graphs import GDN, MAMBA2
from tests.support.dummy_steps import NOBODYS, IdleRank
from tests.support.release import since

if not since("0.27.0"):

    @pytest.mark.parametrize("layers", [MAMBA2, GDN])
    def test_rows_of_requests_that_moved_up(layers: type[Any]) -> None:
        rank = IdleRank(layers)
        rank.step(first=(45, 40, 5), second=(45, 40, 6))
        rank.step(second=(46, 40, 6))
        rank.step()
        assert rank.writes(4) <= NOBODYS

    def test_what_a_graph_of_guesses_was_told_before() -> None:
        rank = IdleRank(GDN, guesses=2)
        rank.told(5)
        assert rank.writes(4) <= NOBODYS


if since("0.19.0"):  # before, no layer asks who is a prompt

    def test_what_a_graph_was_told_before_a_prompt_was_given_up() -> None:
        rank = IdleRank(MAMBA2)
        rank.step(left=(0, 40, 6))
        rank.step()
        rank.told(5)
        assert rank.writes(4) <= NOBODYS

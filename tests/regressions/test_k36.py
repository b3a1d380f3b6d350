"""K36: a cached state of a hybrid is that after as many tokens as it is found by.

What a step may compute runs out inside a block, as it does when other requests have taken the rest.
"""

from __future__ import annotations

import pytest

from tests.support.hybrid_engine import engine_of
from tests.support.nixl_worker import connect
from tests.support.release import since
from tests.support.state_engine import PLENTY, StateEngine
from tests.support.two_way import second_turn, two_way

BLOCK = 16


@pytest.mark.parametrize("left", [1, 12, 15])
def test_a_prompt_whose_end_is_computed_in_parts(left: int) -> None:
    engine = engine_of(
        StateEngine, mode="align", guesses=1, drafts=True, prefix_caching=True, connected=False
    )
    prompt = range(7 * BLOCK)
    engine.ask("whole", prompt, max_tokens=1)
    assert engine.answers("whole")
    engine.ask("in parts", prompt[: 4 * BLOCK + 8], max_tokens=1)
    assert engine.answers("in parts", [3 * BLOCK, left])
    engine.ask("begins like both", [*prompt[: 5 * BLOCK], *range(900, 900 + 20)], max_tokens=1)
    assert engine.answers("begins like both")
    assert engine.computed["begins like both"] == BLOCK + 20
    assert engine.wrong == []


@pytest.mark.parametrize("left", [16, 20])
def test_a_second_turn_that_is_computed_in_parts(left: int) -> None:
    """D has kept the state after 40 tokens. Before 0.21.0 P computes those, too."""
    engine = two_way(engine_of(StateEngine, mode="align", prefix_caching=True))
    connect(engine.worker, "P", num_blocks=64)
    prompt = range(7 * BLOCK)
    engine.send("second turn", prompt, second_turn([[10, 11, 12], [20]], 40), max_tokens=1)
    assert engine.answers("second turn", [PLENTY, PLENTY, left, left])
    assert (engine.computed["second turn"] < 6 * BLOCK) is since("0.21.0")
    for blocks in range(3, 7):  # after fewer P has no state, and 48425 speaks of that
        begins = f"begins with {blocks} blocks"
        engine.ask(begins, [*prompt[: blocks * BLOCK], *range(900, 900 + 20)], max_tokens=1)
        assert engine.answers(begins)
    assert engine.wrong == []

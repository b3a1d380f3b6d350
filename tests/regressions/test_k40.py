"""K40: of a prompt that is computed in parts no state is cached but those that there are.

From 0.30.0 on some layers export a state from within a step.
"""

from __future__ import annotations

import pytest

from tests.support.hybrid_engine import engine_of
from tests.support.release import since
from tests.support.state_engine import StateEngine

BLOCK = 16
EXPORTS = since("0.30.0")
PROMPT = range(1000, 1100)


@pytest.mark.parametrize("parts", [[BLOCK], [2 * BLOCK], [BLOCK, BLOCK]])
def test_a_prompt_that_begins_like_one_that_was_computed_in_parts(parts: list[int]) -> None:
    engine = engine_of(
        StateEngine,
        mode="align",
        guesses=1,
        drafts=EXPORTS,  # up to 0.25.1 other hits of a draft model are wrong: K35
        exports=EXPORTS,
        prefix_caching=True,
        connected=False,
    )
    engine.ask("in parts", PROMPT, max_tokens=1)
    assert engine.answers("in parts", parts)
    for blocks in range(1, 6):
        begins = f"begins with {blocks} blocks"
        engine.ask(begins, [*PROMPT[: blocks * BLOCK], *range(5)], max_tokens=1)
        assert engine.answers(begins)
    assert engine.wrong == []

"""K37: where layers export states, a cached one is after as many tokens as it is found by.

Some do from 0.30.0 on. Before that a part of a block is not found here.
"""

from __future__ import annotations

import pytest

from tests.support.hybrid_engine import engine_of
from tests.support.release import since
from tests.support.state_engine import StateEngine

BLOCK = 16
UNIT = 4 if since("0.30.0") else None
PROMPT = range(1000, 1100)


@pytest.mark.parametrize("shared", [33, 37, 47])
def test_a_prompt_that_goes_on_inside_a_block(shared: int) -> None:
    engine = engine_of(
        StateEngine,
        mode="align",
        exports=bool(UNIT),
        unit=UNIT,
        prefix_caching=True,
        connected=False,
    )
    engine.ask("first", PROMPT[:25], max_tokens=1)
    assert engine.answers("first")
    engine.ask("longer", PROMPT, max_tokens=1)
    assert engine.answers("longer")
    assert engine.computed["longer"] < len(PROMPT), "nothing was found"
    engine.ask("begins like it", [*PROMPT[:shared], *range(5000, 5020)], max_tokens=1)
    assert engine.answers("begins like it")
    assert engine.wrong == []

"""K38: of a block that is found by a part of it, no request copies what is not computed yet.

A prefix ends inside a block from 0.26.0 on (`--prefix-match-unit`). Before that none does here.
"""

from __future__ import annotations

import pytest

from tests.support.hybrid_engine import engine_of
from tests.support.release import since
from tests.support.state_engine import StateEngine

UNIT = 4 if since("0.26.0") else None
PROMPT = range(1000, 1100)


@pytest.mark.parametrize(("shorter", "computes"), [(25, 29), (29, 40), (29, 32)])
def test_two_prompts_of_one_step_that_begin_like_a_third(shorter: int, computes: int) -> None:
    engine = engine_of(
        StateEngine,
        mode="align",
        guesses=1,
        drafts=bool(UNIT),  # up to 0.25.1 other hits of a draft model are wrong: K35
        unit=UNIT,
        prefix_caching=True,
        connected=False,
    )
    engine.ask("shorter", PROMPT[:shorter], max_tokens=1)
    assert engine.answers("shorter")
    engine.ask("computes", PROMPT[:computes], max_tokens=1)
    engine.ask("finds", [*PROMPT[:computes], 5], max_tokens=1)
    assert engine.answers("finds")
    assert engine.finished["computes"] == "length"
    assert engine.wrong == []

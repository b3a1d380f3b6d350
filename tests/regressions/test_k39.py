"""K39: D loads a hybrid's prompt of which it has the beginning of a block, and no state.

A prefix ends inside a block from 0.26.0 on (`--prefix-match-unit`). Before that none does here.
"""

from __future__ import annotations

import pytest

from tests.support.hybrid_engine import engine_of
from tests.support.nixl_worker import attempt, connect
from tests.support.overlapped_engine import OverlappedEngine
from tests.support.release import since
from tests.support.state_engine import StateEngine

UNIT = 4 if since("0.26.0") else None
HYBRID = since("0.23.0")  # up to 0.22.1 D ends of any load of a hybrid that caches: 42554


@pytest.mark.parametrize("shared", [32, 48])
def test_a_prompt_that_begins_like_one_that_d_has(shared: int) -> None:
    """A draft model has a hit end one unit earlier."""
    engine = (
        engine_of(StateEngine, mode="align", guesses=1, drafts=True, unit=UNIT, prefix_caching=True)
        if HYBRID
        else OverlappedEngine()
    )
    connect(engine.worker, "P", num_blocks=64)
    prompt = range(1000, 1100)
    engine.ask("earlier", prompt, max_tokens=1)
    assert engine.run()
    blocks = [[*range(1, shared // 16 + 3)], [10, 11]][: 1 + HYBRID]
    engine.ask("loads", [*prompt[:shared], *range(20)], blocks, max_tokens=1)
    assert attempt(engine.run) is True
    assert engine.finished["loads"] == "length"
    assert engine.wrong == []

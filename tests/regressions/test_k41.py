"""K41: a state is found by a part of a block as long as it is that after this part.

A prefix ends inside a block from 0.26.0 on (`--prefix-match-unit`). Before that none does here.
"""

from __future__ import annotations

from tests.support.hybrid_engine import engine_of
from tests.support.release import since
from tests.support.state_engine import StateEngine

UNIT = 4 if since("0.26.0") else None
PROMPT = range(1000, 1020)


def test_a_prompt_that_begins_like_one_that_is_being_answered() -> None:
    engine = engine_of(
        StateEngine,
        mode="align",
        exports=since("0.30.0"),
        unit=UNIT,
        prefix_caching=True,
        connected=False,
    )
    engine.ask("is answered", PROMPT, max_tokens=500)
    for _ in range(6):
        engine.advance()
    engine.ask("begins like it", [*PROMPT, *range(5)], max_tokens=1)
    for _ in range(6):
        engine.advance()
    assert engine.finished["begins like it"] == "length"
    assert engine.wrong == []


def test_a_prompt_that_begins_like_one_whose_copied_state_was_given_up() -> None:
    engine = engine_of(StateEngine, mode="align", unit=UNIT, prefix_caching=True, connected=False)
    engine.ask("is answered", PROMPT, max_tokens=500)
    for _ in range(6):
        engine.advance()
    free = engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    engine.ask("takes nearly all", range(2000, 2000 + 16 * (free - 3)), max_tokens=1)
    for _ in range(4):
        engine.advance()
    engine.ask("begins like it", [*PROMPT, *range(5)], max_tokens=1)
    assert engine.answers("begins like it")
    assert engine.wrong == []

"""K42: D goes on from a loaded state where the state is, and nobody else is given its block.

A prefix ends inside a block from 0.26.0 on (`--prefix-match-unit`). Before that none does here.
"""

from __future__ import annotations

import pytest

from tests.support.hybrid_engine import engine_of
from tests.support.nixl_worker import connect
from tests.support.release import since
from tests.support.table_engine import TableEngine

UNIT = 4 if since("0.26.0") else None
PROMPT = range(1000, 1020)


@pytest.fixture
def engine() -> TableEngine:
    # up to 0.25.1 other loads of hybrids are wrong: of 0.18.x all, later of those that cache
    made = engine_of(TableEngine, mode="align", unit=UNIT, prefix_caching=bool(UNIT))
    connect(made.worker, "P", num_blocks=64)
    made.ask("is loaded", PROMPT, [[1, 2], [10]] if UNIT else None, max_tokens=500)
    for _ in range(8):
        made.advance()
    return made


def test_a_prompt_that_begins_like_one_that_was_loaded(engine: TableEngine) -> None:
    engine.ask("begins like it", [*PROMPT, *range(5)], max_tokens=1)
    assert engine.answers("begins like it")
    assert engine.wrong == []


def test_the_answer_goes_on_beside_one_that_takes_all_other_blocks(engine: TableEngine) -> None:
    free = engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    engine.ask("takes the others", range(2000, 2000 + 16 * (free - 1)), max_tokens=1)
    engine.answers("takes the others")  # or it waits, where blocks are kept for those that run
    assert engine.wrong == []

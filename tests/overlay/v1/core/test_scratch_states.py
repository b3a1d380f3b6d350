"""What a request holds while its prompt is computed in parts, and what it gives back."""

from __future__ import annotations

import pytest

from tests.support.hybrid_engine import engine_of
from tests.support.state_engine import StateEngine

pytest.importorskip("vllm_overlay.v1.core.scratch_states", reason="0.30.0 and 0.31.0")

BLOCK = 16
PROMPT = range(1000, 1100)


def make(*, exports: bool, guesses: int) -> StateEngine:
    return engine_of(
        StateEngine,
        mode="align",
        guesses=guesses,
        drafts=True,
        exports=exports,
        prefix_caching=True,
        connected=False,
        depth=1,
    )


def held(engine: StateEngine, *parts: int) -> tuple[list[bool], int]:
    """Which of its blocks of states a prompt has, and how many are free, after such parts."""
    engine.ask("in parts", PROMPT, max_tokens=2)
    for tokens in parts:
        engine.scheduler.max_num_scheduled_tokens = tokens
        engine.advance()
    manager = engine.scheduler.kv_cache_manager
    null = manager.block_pool.null_block.block_id
    _, states = manager.get_block_ids("in parts")
    return [block != null for block in states], manager.block_pool.get_num_free_blocks()


@pytest.mark.parametrize("guesses", [1, 3])
@pytest.mark.parametrize("first", [1, 2, 4])
def test_only_states_and_places_for_guesses_are_held(first: int, guesses: int) -> None:
    engine = make(exports=True, guesses=guesses)
    states, free = held(engine, first * BLOCK, 200)
    exported, running = [True], [True] * (1 + guesses)
    assert states[first:] == [False] * (5 - first) + exported + running
    assert sum(states) <= 1 + len(exported) + len(running)  # and that of the first part
    assert engine.run()
    assert engine.finished["in parts"] == "length"
    assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 63
    assert free == 63 - 7 - sum(states)  # 7 are of attention


def test_a_place_for_a_guess_that_a_state_is_exported_to_stays() -> None:
    engine = make(exports=True, guesses=3)
    states, _ = held(engine, 4 * BLOCK, 200)
    assert states[5]
    engine.answers("in parts")
    engine.ask("begins like it", [*PROMPT[: 6 * BLOCK], 1], max_tokens=1)
    assert engine.answers("begins like it")
    assert engine.wrong == []


def test_other_modes_are_as_on_stock() -> None:
    engine = engine_of(StateEngine, mode="all", guesses=1, connected=False)
    engine.ask("in parts", PROMPT, max_tokens=2)
    assert engine.answers("in parts", [BLOCK])

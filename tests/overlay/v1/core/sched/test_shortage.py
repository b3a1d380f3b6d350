"""Who waits for blocks, for how long, and who does not come in meanwhile."""

from __future__ import annotations

import pytest

from tests.support.overlapped_engine import OverlappedEngine

pytest.importorskip("vllm_overlay.v1.core.sched.shortage", reason="0.24.0 to 0.29.0")

TOKENS = 4


def full(*, connected: bool = True) -> OverlappedEngine:
    """An engine whose step runs, with five blocks: two requests have two each, and one is free.

    The next step of the older needs two blocks more: its prompt has two chunks.
    """
    engine = OverlappedEngine(num_blocks=6, connected=connected)
    engine.scheduler.scheduler_config.long_prefill_token_threshold = 32
    engine.scheduler.scheduler_reserve_full_isl = False  # admit it by its first chunk
    engine.ask("older", range(64), max_tokens=TOKENS)
    engine.ask("newer", range(100, 132), max_tokens=TOKENS)
    engine.advance()
    return engine


def test_nobody_comes_in_while_somebody_waits() -> None:
    engine = full()
    engine.ask("outside", range(200, 208), max_tokens=TOKENS)
    decided = engine.advance()
    assert decided is not None
    assert not decided.num_scheduled_tokens, "only `outside` finds a block"
    assert engine.run()
    assert set(engine.finished.values()) == {"length"}
    assert engine.computed["older"] <= 64 + TOKENS


def test_who_came_first_preempts_once_the_step_has_ended() -> None:
    engine = full()
    older, newer = (engine.scheduler.requests[req_id] for req_id in ("older", "newer"))
    engine.advance()
    assert newer.num_preemptions == 0, "its step runs"
    engine.advance()
    assert newer.num_preemptions == 1
    assert engine.run()
    assert older.num_preemptions == 0
    assert newer.num_preemptions == 1


def test_without_a_connector_nobody_waits() -> None:
    engine = full(connected=False)
    newer = engine.scheduler.requests["newer"]
    decided = engine.advance()
    assert decided is not None
    assert set(decided.num_scheduled_tokens) == {"older"}
    assert newer.num_preemptions == 1

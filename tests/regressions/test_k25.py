"""K25: with transfers in both directions every request ends, and its blocks come back.

Before 0.21.0 there are none: what is asked for is computed, and nothing is kept.
"""

from __future__ import annotations

import time

import pytest

from tests.support.idle_engine import IdleEngine
from tests.support.nixl_worker import connect, nixl_of
from tests.support.two_way import second_turn, two_way

PROMPT = list(range(80))
KEPT = 40
"""Tokens of the prompt that D has kept."""


def prefill() -> IdleEngine:
    """P, in a second turn: it reads what D has kept, and computes 16 tokens a step."""
    engine = two_way(IdleEngine())
    engine.scheduler.max_num_scheduled_tokens = 16
    connect(engine.worker, "P")
    engine.send("turn-2", PROMPT, second_turn([[5, 6, 7]], KEPT), max_tokens=1)
    engine.step()
    return engine


def is_answered(engine: IdleEngine, seconds: float = 3.0) -> bool:
    """Whether the second turn ends, without another read."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if "turn-2" in engine.step().finished:
            return engine.reads_in_flight() == 0
        time.sleep(0.001)
    return False


def test_a_second_turn_whose_read_fails_is_computed() -> None:
    engine = prefill()
    nixl_of(engine.worker).fail(*nixl_of(engine.worker).in_flight())
    assert is_answered(engine)


def test_with_a_host_buffer_a_second_turn_is_computed() -> None:
    engine = two_way(IdleEngine())
    vars(vars(engine.scheduler.connector)["connector_scheduler"])["use_host_buffer"] = True
    engine.send("turn-2", PROMPT, second_turn([[5, 6, 7]], KEPT), max_tokens=1)
    assert is_answered(engine)


def test_a_second_turn_that_is_preempted_is_computed() -> None:
    engine = prefill()
    nixl_of(engine.worker).finish(*nixl_of(engine.worker).in_flight())
    while engine.step().computed.get("turn-2", (0, 0))[1] == 0:
        time.sleep(0.001)
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert is_answered(engine)


@pytest.mark.parametrize("nothing", [{"do_remote_prefill": False}, {"session": "of a router"}])
def test_what_nobody_has_prefilled_is_not_kept_for_ever(
    nothing: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """D may keep it for the next turn, but not for longer than it keeps what it has read."""
    monkeypatch.setenv("VLLM_NIXL_ABORT_REQUEST_TIMEOUT", "0")  # in 0.21.0 D keeps it for so long
    engine = two_way(IdleEngine(), keeps=0.05)
    free = engine.step().reusable
    engine.send("turn-1", PROMPT, nothing)
    for _ in range(3):
        engine.step()
    time.sleep(0.1)
    engine.step()
    assert engine.step().reusable == free

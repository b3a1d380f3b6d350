"""49675: where a running request is short of a block, not every other is preempted for it.

Steps overlap, as with async scheduling or pipeline stages, and D's cache has no block left when the
oldest of two needs its next one. Who is preempted has to compute its prompt again, as far as the
prefix cache does not have it, and from 0.27.0 on what its running step samples is lost as well.
"""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from tests.support.overlapped_engine import OverlappedEngine

OLDEST, NEWEST, OTHER = range(32), range(100, 132), range(200, 232)
"""Prompts of two blocks each."""

TOKENS = 4


def make(*, num_blocks: int = 5, priority: bool = False, **config: Any) -> OverlappedEngine:  # noqa: ANN401 - handed on
    """An engine with room for two prompts, but for the null block."""
    engine = OverlappedEngine(num_blocks=num_blocks, **config)
    if priority:
        engine.serve_by_priority()
    return engine


def ask(engine: OverlappedEngine, req_id: str, prompt: range) -> Request:
    """Add a request, to be looked at when it has ended."""
    engine.ask(req_id, prompt, max_tokens=TOKENS)
    return engine.scheduler.requests[req_id]


def once(prompt: range) -> int:
    """How many tokens the model computes for a request that nobody interrupts."""
    return len(prompt) + TOKENS - 1


@pytest.mark.parametrize("depth", [2, 3])
def test_the_oldest_runs_on(depth: int) -> None:
    engine = make(depth=depth)
    oldest = ask(engine, "oldest", OLDEST)
    ask(engine, "newest", NEWEST)
    assert engine.run(), "no request ever ends"
    assert engine.finished == {"oldest": "length", "newest": "length"}
    assert oldest.num_preemptions == 0
    assert engine.computed["oldest"] <= once(OLDEST) + depth - 1  # decided on before it has ended
    assert engine.wrong == []


def test_the_oldest_runs_on_with_pipeline_stages() -> None:
    engine = make(scheduler=Scheduler)
    oldest = ask(engine, "oldest", OLDEST)
    engine.advance()
    ask(engine, "newest", NEWEST)
    assert engine.run(), "no request ever ends"
    assert oldest.num_preemptions == 0


@pytest.mark.parametrize("first", ["urgent", "patient"])
def test_the_more_urgent_runs_on(first: str) -> None:
    engine = make(priority=True)
    asked = {}
    for number, req_id in enumerate(sorted(["urgent", "patient"], key=first.__ne__)):
        prompt = NEWEST if req_id == "urgent" else OLDEST[:20]  # far from its next block
        asked[req_id] = ask(engine, req_id, prompt)
        asked[req_id].priority = 9 if req_id == "patient" else 0
        asked[req_id].arrival_time = number
    assert engine.run(), "no request ever ends"
    assert asked["urgent"].num_preemptions == 0
    assert engine.computed["urgent"] <= once(NEWEST) + 1


def test_blocks_that_are_about_to_be_free_are_awaited() -> None:
    engine = make(num_blocks=7)
    stay = [ask(engine, "oldest", OLDEST), ask(engine, "newest", NEWEST)]
    ask(engine, "leaves", OTHER)
    engine.advance()
    engine.abort("leaves")
    assert engine.run()
    assert [request.num_preemptions for request in stay] == [0, 0]

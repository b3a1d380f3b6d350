"""45357: what a request receives is not overwritten by a step that ran before it came.

Steps overlap, as with async scheduling or pipeline stages. Every test makes D's cache so small
that a request which receives its prompt gets the blocks that another has just left, while a step
still runs that computes for the other.
"""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.core.sched.scheduler import Scheduler

from tests.support.nixl_worker import connect
from tests.support.overlapped_engine import OverlappedEngine

REMOTE = [[10, 11, 12, 13, 14]]
"""P's blocks of a prompt of 79 tokens."""

PROMPT = range(1000, 1079)


def make(**config: Any) -> OverlappedEngine:  # noqa: ANN401 - handed on
    engine = OverlappedEngine(num_blocks=8, **config)
    connect(engine.worker, "P", num_blocks=64)
    return engine


def answered(engine: OverlappedEngine) -> None:
    """The request that receives gets its answer from the KV that it received."""
    assert engine.run(), "the engine has something left to do"
    assert engine.finished["received"] == "length"
    assert engine.computed["received"] <= 2, "the prompt was computed, it should be received"
    assert engine.wrong == []


@pytest.mark.parametrize("depth", [2, 3])
def test_an_abort_while_its_steps_run(depth: int) -> None:
    engine = make(depth=depth)
    engine.ask("left", range(40), max_tokens=20)
    engine.advance()
    engine.advance()
    engine.abort("left")
    engine.ask("received", PROMPT, REMOTE, max_tokens=1)
    answered(engine)


def test_an_abort_while_its_prompt_is_computed() -> None:
    engine = make(scheduler=Scheduler)  # pipeline stages, without async scheduling
    engine.ask("left", range(40), max_tokens=20)
    engine.advance()
    engine.abort("left")
    engine.ask("received", PROMPT, REMOTE, max_tokens=1)
    answered(engine)


def test_a_stop_token_when_the_next_step_runs_already() -> None:
    engine = make()
    engine.ask("left", range(40), max_tokens=20, stops_after=2)
    while "left" not in engine.finished:
        engine.advance()
    engine.ask("received", PROMPT, REMOTE, max_tokens=1)
    answered(engine)


def test_a_preemption_while_its_step_runs() -> None:
    engine = make(depth=3, scheduler=Scheduler)
    prompts = {"first": range(16), "second": range(100, 116), "left": range(200, 280)}
    for req_id, prompt in prompts.items():
        engine.ask(req_id, prompt, max_tokens=2)
        engine.advance()
    engine.advance()  # `first` needs a block more, and `left` has it: it is preempted
    engine.abort("left")
    engine.ask("received", PROMPT[:47], [REMOTE[0][:3]], max_tokens=1)
    answered(engine)

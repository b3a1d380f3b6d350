"""47728: what a window leaves is not received into while a step that reads it still runs.

Steps overlap, as with async scheduling. D's cache is so small that a request which receives its
prompt gets the blocks that the window of another has just left, and the step before still has the
other's tokens from which the window reaches into them.
"""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.core.sched.scheduler import Scheduler

from tests.support.nixl_worker import connect
from tests.support.overlapped_engine import OverlappedEngine

REMOTE = [10, 11, 12, 13, 14]
"""P's blocks of a prompt of 79 tokens, for each group."""

PROMPT = range(1000, 1079)


def make(**config: Any) -> OverlappedEngine:  # noqa: ANN401 - handed on
    engine = OverlappedEngine(**config)
    connect(engine.worker, "P", num_blocks=64)
    return engine


def answered(engine: OverlappedEngine) -> None:
    """Both get their answers, from their own KV; what is received is not computed."""
    assert engine.run(), "the engine has something left to do"
    assert engine.finished == {"long": "length", "received": "length"}
    assert engine.computed["received"] <= 2, "the prompt was computed, it should be received"
    assert engine.wrong == []


def test_a_prompt_is_computed_over_more_than_the_window() -> None:
    engine = make(groups=("sliding",), num_blocks=8)
    engine.ask("long", range(90), max_tokens=4)
    engine.advance()
    engine.ask("received", PROMPT, [REMOTE], max_tokens=1)
    answered(engine)


@pytest.mark.parametrize("depth", [2, 3])
def test_beside_layers_that_keep_every_token(depth: int) -> None:
    engine = make(groups=("full", "sliding"), num_blocks=16, depth=depth)
    engine.ask("long", range(90), max_tokens=4)
    engine.advance()
    engine.ask("received", PROMPT[:30], [REMOTE[:2]] * 2, max_tokens=1)
    answered(engine)


def test_a_prompt_is_computed_in_parts() -> None:
    engine = make(groups=("sliding",), num_blocks=8, scheduler=Scheduler)  # pipeline stages
    engine.scheduler.max_num_scheduled_tokens = 48
    engine.ask("long", range(90), max_tokens=4)
    engine.advance()
    engine.ask("received", PROMPT[:20], [REMOTE[:2]], max_tokens=1)
    answered(engine)

"""50297: a request that is preempted in its last step is computed anew, then handed out.

Steps overlap: while the last token of a request is sampled on the GPU, the scheduler decides the
next step, and takes the request's blocks for one that came before it.
"""

from __future__ import annotations

import pytest

from tests.support.decode_engine import TOKEN
from tests.support.nixl_worker import attempt
from tests.support.prefill_engine import PrefillEngine

PROMPT = list(range(32))
"""Two blocks of KV."""


def test_what_is_handed_out_holds_the_prompt() -> None:
    engine = PrefillEngine(num_blocks=4)  # one of them is vLLM's null block
    engine.prefill("first", range(100, 116), max_tokens=3, params={})  # soon wants a second one
    engine.prefill("asked", PROMPT)
    attempt(engine.run, 8)
    assert engine.handed_out.get("asked") == PROMPT
    assert engine.tokens == {"first": 3 * [TOKEN], "asked": [TOKEN]}


def test_one_that_generates_is_handed_out_with_what_it_generated() -> None:
    engine = PrefillEngine(num_blocks=5)
    engine.prefill("first", range(100, 114), max_tokens=4, params={})
    engine.prefill("second", range(300, 331), max_tokens=4, params={})
    engine.prefill("asked", PROMPT[:14], max_tokens=2)
    attempt(engine.run, 12)
    assert engine.handed_out.get("asked", [])[:15] == [*PROMPT[:14], TOKEN]
    assert engine.tokens["asked"] == 2 * [TOKEN]


def overlapping() -> PrefillEngine:
    """An engine with stages: "asked" has lost its blocks, and its token is on the way."""
    engine = PrefillEngine(num_blocks=7, async_scheduling=False)
    engine.scheduler.scheduler_config.long_prefill_token_threshold = 16
    engine.prefill("long", range(100, 196), params={})
    engine.prefill("asked", PROMPT)
    while "asked" in engine.schedule():
        pass
    while engine.scheduler.requests["asked"].num_computed_tokens:
        engine.schedule()
    return engine


def test_nothing_is_handed_out_before_it_is_computed_again() -> None:
    engine = overlapping()
    engine.leave("long")
    engine.scheduler.reset_prefix_cache()
    engine.schedule()  # the first half of the prompt
    attempt(engine.run, 8, at_once=1)
    assert engine.handed_out.get("asked") == PROMPT
    assert engine.tokens["asked"] == [TOKEN]


def test_without_async_scheduling() -> None:
    engine = overlapping()
    attempt(engine.run, 12, at_once=1)
    assert engine.handed_out.get("asked") == PROMPT
    assert engine.tokens["asked"] == [TOKEN]


@pytest.mark.parametrize("steps", [1, 2])
def test_preempted_by_a_reset_of_the_prefix_cache(steps: int) -> None:
    """As when a trainer has new weights for the model; an engine with stages."""
    engine = PrefillEngine(async_scheduling=False)
    engine.prefill("asked", PROMPT)
    engine.schedule()
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    for _ in range(steps):
        engine.schedule()
    attempt(engine.run, 4, at_once=1)
    assert engine.handed_out.get("asked") == PROMPT
    assert engine.tokens["asked"] == [TOKEN]

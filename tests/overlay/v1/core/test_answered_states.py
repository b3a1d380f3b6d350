"""A prompt's state is cached when it is computed, and not when its answer goes on from it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.support.hybrid_engine import engine_of
from tests.support.release import since
from tests.support.state_engine import StateEngine

answered_states = pytest.importorskip(
    "vllm_overlay.v1.core.answered_states", reason="0.26.0 to 0.31.0"
)

PROMPT = range(1000, 1020)


@pytest.mark.parametrize("exports", [False, since("0.30.0")])
def test_what_is_found_of_a_prompt_that_is_being_answered(exports: bool) -> None:
    engine = engine_of(
        StateEngine, mode="align", exports=exports, unit=4, prefix_caching=True, connected=False
    )
    engine.ask("is answered", PROMPT, max_tokens=100)
    for _ in range(6):
        engine.advance()
    engine.ask("begins like it", [*PROMPT, *range(5)], max_tokens=1)
    for _ in range(6):
        engine.advance()
    assert engine.wrong == []
    assert engine.computed["begins like it"] == (9 if exports else 5)


@pytest.mark.parametrize(
    ("computed", "placeholders", "is_told"),
    [(71, 0, True), (72, 0, True), (71, 1, True), (72, 1, False), (73, 1, False)],
    ids=["prompt", "loaded", "next-input-of-a-session", "answer", "answer-with-two-steps"],
)
def test_steps_of_an_answer_alone_are_left_out(
    computed: int, placeholders: int, is_told: bool
) -> None:
    """A session's next input may come while places of its last answer are kept."""
    request = SimpleNamespace(num_computed_tokens=computed, num_output_placeholders=placeholders)
    cache = answered_states.before_the_answer(lambda _, *told, **more: (told, more))
    cached = cache(None, request, 72, retention_interval=0)
    assert cached == (((request, 72), {"retention_interval": 0}) if is_told else None)

"""A prompt's state is cached when it is computed, and not when its answer goes on from it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.support.hybrid_engine import engine_of
from tests.support.state_engine import StateEngine

answered_states = pytest.importorskip(
    "vllm_overlay.v1.core.answered_states", reason="0.30.0 and 0.31.0"
)

PROMPT = range(1000, 1020)


@pytest.mark.parametrize("exports", [False, True])
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


@pytest.mark.parametrize("exports", [False, True])
@pytest.mark.parametrize("placeholders", [0, 1])
def test_what_a_step_exports_is_cached_whatever_comes(placeholders: int, exports: bool) -> None:
    """0.30.0 keeps the places of an answer that a session's next input has ended."""
    manager = SimpleNamespace(_checkpoints={"session": (64, 3)} if exports else {})
    request = SimpleNamespace(request_id="session", num_output_placeholders=placeholders)
    cache = answered_states.before_the_answer(lambda _, request, tokens: (request, tokens))
    cached = cache(manager, request, 72)
    assert cached == (None if placeholders and not exports else (request, 72))

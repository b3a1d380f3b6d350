"""A prompt's state is cached when it is computed, and not when its answer goes on from it."""

from __future__ import annotations

import pytest

from tests.support.hybrid_engine import engine_of
from tests.support.state_engine import StateEngine

pytest.importorskip("vllm_overlay.v1.core.answered_states", reason="0.30.0 and 0.31.0")

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

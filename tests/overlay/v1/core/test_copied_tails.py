"""Who finds a part of a block waits for the step that computes it, and for nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from tests.support.hybrid_engine import engine_of
from tests.support.release import since
from tests.support.state_engine import StateEngine

pytest.importorskip("vllm_overlay.v1.core.copied_tails", reason="from 0.26.0 on")

PROMPT = range(1000, 1100)


def make(**config: Any) -> StateEngine:  # noqa: ANN401 - of `engine_of`
    return engine_of(
        StateEngine,
        mode="align",
        guesses=1,
        drafts=True,
        unit=4,
        prefix_caching=True,
        connected=False,
        depth=1,
        **config,
    )


def answered(engine: StateEngine, prompt: Sequence[int]) -> None:
    engine.ask(f"answered {len(prompt)}", prompt, max_tokens=1)
    assert engine.run()


def steps(engine: StateEngine, *budgets: int) -> list[dict[str, int]]:
    """How many tokens of whom are computed in steps of at most so many."""
    decided = []
    for tokens in budgets:
        engine.scheduler.max_num_scheduled_tokens = tokens
        step = engine.advance()
        decided.append(dict(step.num_scheduled_tokens) if step else {})
    return decided


def ask(engine: StateEngine, prompts: dict[str, Iterable[int]]) -> None:
    for req_id, prompt in prompts.items():
        engine.ask(req_id, prompt, max_tokens=1)


def test_who_finds_a_part_waits_for_the_step_that_computes_it() -> None:
    engine = make()
    answered(engine, PROMPT[:29])
    ask(engine, {"computes": PROMPT[:40], "finds": [*PROMPT[:40], 5], "behind": range(8)})
    if since("0.30.0"):  # hits are longer
        assert steps(engine, 64, 64) == [
            {"computes": 8},
            {"computes": 4, "finds": 8, "behind": 4},
        ]
    else:
        assert steps(engine, 64, 64, 64) == [
            {"computes": 16},
            {"computes": 24},
            {"finds": 4, "behind": 8},
        ]
    assert engine.run()
    assert engine.wrong == []


def test_what_was_computed_before_the_step_is_copied_in_it() -> None:
    engine = make()
    answered(engine, PROMPT[:29])
    ask(engine, {"computes": PROMPT[:40]})
    steps(engine, 16, 12)
    ask(engine, {"finds": [*PROMPT[:32], *range(30)]})
    assert steps(engine, 64) == [{"computes": 4, "finds": 8 if since("0.30.0") else 4}]
    assert engine.run()
    assert engine.wrong == []


def test_nobody_waits_for_an_answer_behind_the_part() -> None:
    engine = make()
    answered(engine, PROMPT[:21])
    engine.ask("answers", PROMPT[:25], max_tokens=4)
    steps(engine, 64, 64, 64)
    ask(engine, {"finds": [*PROMPT[:24], *range(30)]})
    [step] = steps(engine, 64)
    assert set(step) == {"answers", "finds"}

"""48425: what the prefix cache has of a hybrid's prompt is used with its state, or not at all.

Attention's blocks and recurrent states are cached apart: of a prompt all blocks, and the state at
its end. A connector may load the state, and mostly loads nothing: P computes its prompts, and so
does D where it was asked without P.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.hybrid_engine import engine_of
from tests.support.nixl_worker import connect
from tests.support.overlapped_engine import OverlappedEngine
from tests.support.release import since
from tests.support.state_engine import StateEngine

BLOCK = 16
UNIT = 4 if since("0.26.0") else None  # before that no part of a block is found here

EARLIER = range(4 * BLOCK)
"""A prompt whose blocks are cached, and its state."""

SHARED = range(2 * BLOCK)
"""How it begins: of this only the blocks are."""

OTHER = range(500, 500 + 2 * BLOCK)

TURNS = 20
"""More than a request takes. P goes on for longer, as nobody reads from it."""

TO_D = {"do_remote_decode": True}


def make(**config: Any) -> OverlappedEngine:  # noqa: ANN401 - of `OverlappedEngine`
    """An engine that keeps the states at the ends of prompts."""
    return engine_of(OverlappedEngine, mode="align", prefix_caching=True, **config)


@pytest.mark.parametrize("params", [TO_D, None], ids=["p", "d"])
def test_a_shared_beginning_without_a_state_is_computed(params: dict[str, Any] | None) -> None:
    engine = make()
    engine.send("earlier", EARLIER, params)
    engine.run(TURNS)
    second = engine.send("second", [*SHARED, *OTHER], params)
    engine.run(TURNS)
    assert engine.finished["second"] == "length"
    assert engine.wrong == []
    assert engine.computed["second"] >= second.num_prompt_tokens


def test_a_state_that_outlives_its_blocks_is_not_used() -> None:
    engine = make(num_blocks=9)
    engine.ask("earlier", EARLIER, max_tokens=1)
    assert engine.run()
    engine.ask("other", OTHER)  # takes the last blocks of `earlier`, and leaves its state
    assert engine.run()
    engine.ask("second", range(5 * BLOCK), max_tokens=1)
    assert engine.run()
    assert engine.wrong == []


@pytest.mark.parametrize("params", [TO_D, None], ids=["p", "d"])
def test_logprobs_of_a_prompt_are_of_all_its_tokens(params: dict[str, Any] | None) -> None:
    engine = make()
    engine.send("earlier", EARLIER, params)
    engine.run(TURNS)
    second = engine.send("second", [*EARLIER, *OTHER], params, prompt_logprobs=1)
    engine.run(TURNS)
    assert engine.finished["second"] == "length"
    assert engine.computed["second"] >= second.num_prompt_tokens


@pytest.mark.parametrize("shared", [6, 22, 30])
def test_a_load_that_begins_inside_a_block(shared: int) -> None:
    hybrid = since("0.23.0")  # up to 0.22.1 D ends of any load of a hybrid that caches: 42554
    engine = (
        engine_of(StateEngine, mode="align", unit=UNIT, prefix_caching=True)
        if hybrid
        else OverlappedEngine()
    )
    connect(engine.worker, "P", num_blocks=64)
    engine.ask("here", EARLIER[:shared], max_tokens=1)
    assert engine.run()
    engine.ask("loads", EARLIER[:40], [[1, 2, 3], [10]][: 1 + hybrid])
    assert engine.run()
    assert engine.finished["loads"] == "length"
    assert engine.computed["loads"] <= 2
    assert engine.wrong == []

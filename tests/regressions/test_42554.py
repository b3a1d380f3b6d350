"""42554: a D whose hybrid model caches prefixes receives prompts."""

from __future__ import annotations

import pytest

from tests.support.decode_engine import DecodeEngine, Step
from tests.support.handed_over import handed_over
from tests.support.hybrid_engine import engine_of
from tests.support.nixl_worker import EngineDiedError, attempt, connect, nixl_of
from tests.support.prefill_engine import PrefillEngine

BLOCK = 16
NULL = 0
"""Id of the block that stands for none."""


def asked(prompt: range) -> DecodeEngine:
    """A D that is asked for what P has computed of a prompt."""
    d = engine_of(DecodeEngine, mode="align", prefix_caching=True)
    connect(d.worker, "P")
    p = engine_of(PrefillEngine, mode="align", prefix_caching=True)
    params = handed_over(p, "joins", prompt)
    _, states = params["remote_block_ids"]
    assert states[-1] != NULL, "P has given up the state"
    d.send("joins", prompt, params, max_tokens=2 * BLOCK)
    return d


def comes_to_its_end(d: DecodeEngine) -> list[tuple[int, int]]:
    """What D computes of the request, step by step."""
    steps: list[Step] = []
    while not any("joins" in step.finished for step in steps):
        steps.append(d.step())
        assert len(steps) < 4 * BLOCK, "it does not end"
    assert steps[-1].finished == {"joins": "length"}
    return [step.computed["joins"] for step in steps if step.computed]


@pytest.mark.parametrize("size", [BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK - 1, 3 * BLOCK + 1])
def test_a_prompt_is_received(size: int) -> None:
    d = asked(range(1000, 1000 + size))
    assert not isinstance(attempt(d.step), EngineDiedError)
    nixl_of(d.worker).finish(*nixl_of(d.worker).reads)
    computed = comes_to_its_end(d)
    assert computed[0] == (size - 1, size)
    assert len(computed) == 2 * BLOCK

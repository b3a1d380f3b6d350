"""48481: what a model with states receives is not erased by the zeroes for new blocks.

Such a model's worker zeroes the attention blocks that a step newly gives out, on the device, when
the steps before have ended. What is received comes when it comes.
"""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.core.sched.scheduler import Scheduler

from tests.support.nixl_worker import connect
from tests.support.overlapped_engine import OverlappedEngine

PROMPT = range(1000, 1079)
REMOTE = [[10, 11, 12, 13, 14], [20]]
"""P's blocks of the prompt: five with KV, and the state."""


class Zeroing(OverlappedEngine):
    """Zeroes blocks as the device does: at last before the step that says so is computed."""

    def _end(self) -> None:
        for block in self.steps[0].decided.new_block_ids_to_zero or ():
            for offset in range(self.block_size):
                self.cache.pop((block, offset), None)
        super()._end()


def make(**config: Any) -> Zeroing:  # noqa: ANN401 - handed on
    engine = Zeroing(groups=("full", "mamba"), num_blocks=32, **config)
    connect(engine.worker, "P", num_blocks=64)
    return engine


def answered(engine: Zeroing) -> None:
    """The request that receives gets its answer from the KV that it received."""
    assert engine.run(), "the engine has something left to do"
    assert engine.finished["received"] == "length"
    assert engine.computed["received"] <= 3, "the prompt was computed, it should be received"
    assert engine.wrong == []


@pytest.mark.parametrize("length", [79, 80, 82, 16, 18, 5])
def test_while_another_computes(length: int) -> None:
    engine = make()
    engine.ask("computed", range(8), max_tokens=8)  # in one block: it leaves no state behind
    engine.advance()
    remote = [[10 + i for i in range(-(-length // 16))], REMOTE[1]]
    engine.ask("received", range(1000, 1000 + length), remote, max_tokens=2)
    answered(engine)


def test_nothing_else_runs() -> None:
    engine = make(depth=1, scheduler=Scheduler)
    engine.ask("received", PROMPT, REMOTE, max_tokens=2)
    answered(engine)


def test_only_blocks_that_are_computed_are_zeroed() -> None:
    engine = make()
    engine.ask("received", PROMPT, REMOTE, max_tokens=2)
    engine.ask("computed", range(40), max_tokens=8)
    decided = engine.advance()
    assert decided is not None
    attention, _ = engine.scheduler.kv_cache_manager.get_block_ids("computed")
    assert sorted(decided.new_block_ids_to_zero or ()) == sorted(attention)

"""K27: a window has all of its blocks also after guesses of a step in flight were rejected.

Speculative decoding with async scheduling, and layers that attend to a window. The model rejects
every guess, so the next step begins earlier than the scheduler counted, and its window too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import pytest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager

from tests.support.nixl_worker import GroupKind, connect
from tests.support.overlapped_engine import OverlappedEngine, Part

GUESSES = 3

PROMPT = range(40)
"""Longer than the window, of which the last token is not computed where it was received."""

TOKENS = 34
"""In the answer: the window moves on by two blocks."""


class GuessingEngine(OverlappedEngine):
    """None of its guesses is right. A window that reaches into no block is misread, too."""

    def __init__(self, groups: Sequence[GroupKind]) -> None:
        super().__init__(groups=groups)
        self.guess(GUESSES)
        self.scheduler._spec_token_placeholders = [-1] * GUESSES
        self._guesses: dict[str, int] = {}

    def _launch(self) -> SchedulerOutput:
        before = self._guesses
        decided = super()._launch()
        guessed = decided.scheduled_spec_decode_tokens
        self._guesses = {req_id: len(guesses) for req_id, guesses in guessed.items()}
        for req_id, part in self.steps[-1].parts.items():
            late = before.get(req_id, 0) if len(self.steps) > 1 else 0
            end = part.end - late - self._guesses.get(req_id, 0)
            self.steps[-1].parts[req_id] = dataclasses.replace(
                part, start=part.start - late, end=end
            )
        return decided

    def _misread(self, part: Part) -> Iterator[tuple[int, int]]:
        yield from super()._misread(part)
        managers = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        for manager, group in zip(managers, part.blocks, strict=True):
            if isinstance(manager, SlidingWindowManager):
                seen = range(max(0, manager.get_num_skipped_tokens(part.start)), part.start)
                found = {place for _, place in self._places(seen, group)}
                yield from ((0, token) for token in seen[: len(seen) - len(found)])


@pytest.mark.parametrize("groups", [("sliding",), ("full", "sliding")], ids=["alone", "beside"])
def test_a_prompt_that_was_received(groups: Sequence[GroupKind]) -> None:
    engine = GuessingEngine(groups)
    connect(engine.worker, "P", num_blocks=64)
    engine.ask("asked", PROMPT, [[1, 2, 3]] * len(groups), max_tokens=TOKENS)
    assert engine.run()
    assert engine.finished == {"asked": "length"}
    assert engine.wrong == []


@pytest.mark.parametrize("groups", [("sliding",), ("full", "sliding")], ids=["alone", "beside"])
def test_a_prompt_that_was_computed(groups: Sequence[GroupKind]) -> None:
    engine = GuessingEngine(groups)
    engine.ask("asked", PROMPT, max_tokens=TOKENS)
    assert engine.run()
    assert engine.finished == {"asked": "length"}
    assert engine.wrong == []

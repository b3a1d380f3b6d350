"""53962: places for guesses that a joining request gets are within what the model can compute.

D speculates. The last token of a prompt that it has received is computed beside a running request,
with as many places for guesses as that one has.
"""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.core.sched.output import SchedulerOutput

from tests.support.decode_engine import DecodeEngine
from tests.support.nixl_worker import connect, nixl_of
from tests.support.release import since

LONGEST = 2048
"""Tokens: `max_model_len` of the harness."""

BLOCK = 16


class GuessingEngine(DecodeEngine):
    """Its requests guess three tokens; `decided` is what the last step computes."""

    guesses = 3

    def __init__(self, **config: Any) -> None:  # noqa: ANN401 - handed on
        super().__init__(**config)
        self.guess(self.guesses)
        connect(self.worker, "P", num_blocks=400)
        self.ask("runs", range(5000, 5020), max_tokens=60)
        self.step()

    def _start(self, decided: SchedulerOutput) -> None:
        super()._start(decided)
        self.decided = decided

    def receive(self, req_id: str, tokens: int, **how: Any) -> None:  # noqa: ANN401 - handed on
        """Have a prompt received; the next step computes its last token."""
        start = 10_000 * len(self.scheduler.requests)
        blocks = list(range(1, tokens // BLOCK + 2))
        self.ask(req_id, range(start, start + tokens), [blocks[: -(-tokens // BLOCK)]], **how)
        self.step()
        nixl_of(self.worker).finish(*nixl_of(self.worker).in_flight())
        self.step()


@pytest.mark.parametrize("room", [1, 2, 3])
def test_a_prompt_near_the_longest_is_answered_beside_others(room: int) -> None:
    engine = GuessingEngine(num_blocks=400)
    engine.receive("joins", LONGEST - room, max_tokens=1)
    computed = engine.step().computed
    assert "joins" in computed, "it waits for as long as others run"
    _, end = computed["joins"]
    assert end < LONGEST, "there is no place for what it samples"


def test_who_comes_after_such_a_prompt_is_answered() -> None:
    engine = GuessingEngine(num_blocks=400)
    engine.receive("joins", LONGEST - 1, max_tokens=1)
    engine.ask("behind", range(900, 920), max_tokens=1)
    ended: dict[str, str] = {}
    for _ in range(6):
        ended |= engine.step().finished
    assert set(ended) == {"joins", "behind"}


def test_a_row_of_a_hybrid_has_as_many_tokens_as_places() -> None:
    engine = GuessingEngine()
    if since("0.25.0"):  # before, no row has places, and whole blocks are 46694's matter
        engine.scheduler.need_mamba_block_aligned_split = True  # as with mamba_cache_mode align
        engine.receive("joins", 5 * BLOCK, max_tokens=1)
    else:
        engine.receive("joins", 5 * BLOCK - 8, max_tokens=1)
    engine.step()
    places = engine.decided.scheduled_spec_decode_tokens.get("joins", [])
    assert engine.decided.num_scheduled_tokens["joins"] == 1 + len(places)

"""K22: the last token of a prompt that was received sees all of its window.

The window is two blocks of 16 tokens. D computes the last token once more, and that one looks a
token further back than the next. For one length in 16 that is the last token of a block. D has to
have that block, and P to name it.
"""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.core.sched.scheduler import Scheduler

from tests.support.hybrid_engine import engine_of
from tests.support.nixl_worker import connect, nixl_of
from tests.support.overlapped_engine import OverlappedEngine
from tests.support.prefill_engine import PrefillEngine
from tests.support.release import since

WINDOW = 32
FIRST = 40
"""The first block that P names of each group; its first is not that of either of ours."""

LENGTHS = [47, 63, 79]
"""Tokens of prompts whose last one sees the last of a block, and the next one does not."""

HOW: list[dict[str, Any]] = [{}, {"depth": 1, "scheduler": Scheduler}]


def decoding(hits: int = 0, **config: Any) -> OverlappedEngine:  # noqa: ANN401 - handed on
    """An engine with a prompt of so many blocks in its prefix cache."""
    engine = OverlappedEngine(groups=("full", "sliding"), **config)
    connect(engine.worker, "P", num_blocks=64)
    if hits:
        engine.ask("before", range(16 * hits), max_tokens=1)
        assert engine.run()
    return engine


def named(length: int) -> list[list[int]]:
    """P's blocks for a prompt: all, and those of a window, one more than it has at the most."""
    blocks = list(range(FIRST, FIRST + -(-length // 16)))
    return [blocks, blocks[-3:]]


def seen(engine: OverlappedEngine, length: int) -> set[int]:
    """The places of the request's blocks that the window of its last token covers, as tokens."""
    null = engine.scheduler.kv_cache_manager.block_pool.null_block.block_id
    _, window = engine.scheduler.kv_cache_manager.get_block_ids("asked")
    return {token for token in range(length) if window[token // 16] != null}


def arrivals(engine: OverlappedEngine) -> set[tuple[int, int]]:
    """Each block of P that is read for the window, and at which place of it that arrives."""
    _, window = engine.scheduler.kv_cache_manager.get_block_ids("asked")
    return {
        (theirs % 64, window.index(ours % 64))
        for read in nixl_of(engine.worker).reads
        for theirs, ours in zip(read.remote, read.local, strict=True)
        if ours % 64 in window
    }


@pytest.mark.parametrize("hits", [0, 1])
@pytest.mark.parametrize("length", LENGTHS)
def test_the_window_of_the_last_token_is_kept(length: int, hits: int) -> None:
    engine = decoding(hits)
    engine.ask("asked", range(length), named(length))
    engine.advance()
    assert set(range(length - WINDOW, length)) <= seen(engine, length)


@pytest.mark.parametrize("length", LENGTHS)
def test_every_block_of_it_is_read_and_arrives_where_it_was(length: int) -> None:
    engine = decoding()
    engine.ask("asked", range(length), named(length))
    engine.advance()
    first = (length - WINDOW) // 16
    assert arrivals(engine) == {(FIRST + i, i) for i in range(first, -(-length // 16))}


@pytest.mark.parametrize("step_tokens", [None, 16])
@pytest.mark.parametrize("length", LENGTHS)
def test_p_names_them(length: int, step_tokens: int | None) -> None:
    engine = PrefillEngine(groups=("full", "sliding"), step_tokens=step_tokens)
    engine.prefill("asked", range(length))
    engine.run(8)
    answer = engine.answers["asked"]
    assert answer is not None
    null = engine.scheduler.kv_cache_manager.block_pool.null_block.block_id
    _, window = answer["remote_block_ids"]
    ends = -(-length // 16)
    named = {
        place
        for place, block in zip(range(ends)[::-1], window[::-1], strict=False)
        if block != null
    }
    assert set(range((length - WINDOW) // 16, ends)) <= named


@pytest.mark.parametrize("blocks", [1, 3])
def test_p_names_the_state_of_a_hybrid(blocks: int) -> None:
    """What it has computed ends with a block: of the prompt all but its last token, or all."""
    length = 16 * blocks + since("0.19.0")
    engine = engine_of(PrefillEngine, mode="align", prefix_caching=True)
    engine.prefill("asked", range(length))
    engine.run(8)
    answer = engine.answers["asked"]
    assert answer is not None
    null = engine.scheduler.kv_cache_manager.block_pool.null_block.block_id
    _, states = answer["remote_block_ids"]
    assert states[-1] != null


@pytest.mark.parametrize("config", HOW, ids=["async", "sync"])
@pytest.mark.parametrize("length", LENGTHS)
def test_the_answer_starts_from_what_was_received(length: int, config: dict[str, Any]) -> None:
    engine = decoding(**config)
    engine.ask("asked", range(length), named(length), max_tokens=20)
    missed: list[set[int]] = []
    while engine.scheduler.has_requests() or engine.steps:
        engine.advance()
        if engine.computed.get("asked") and not missed:
            missed.append(set(range(length - WINDOW, length)) - seen(engine, length))
    assert missed == [set()]
    assert engine.finished == {"asked": "length"}
    assert engine.computed["asked"] <= 21, "the prompt was computed, it should be received"
    assert engine.wrong == []

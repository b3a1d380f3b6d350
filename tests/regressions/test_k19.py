"""K19: D reads the blocks of its prompt, whatever P computed after it.

A router may let P generate more than one token. P's answer then names the blocks of those too, and
D, whose prompt ends before them, must not take them for the prompt's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from tests.support.decode_engine import DecodeEngine
from tests.support.nixl_worker import connect, nixl_of
from tests.support.prefill_engine import PrefillEngine

PROMPT = range(197)
"""13 blocks of 16 tokens; P's 20 further tokens begin a 14th."""

NAMED = range(30, 44)


def answered(prompt: Iterable[int], tokens: int, **config: Any) -> list[list[int]]:  # noqa: ANN401 - of the engine
    """The blocks that P names, for each group, when it has generated so many tokens."""
    engine = PrefillEngine(**config)
    engine.prefill("asked", prompt, max_tokens=tokens)
    engine.run(tokens + 2)
    answer = engine.answers["asked"] or {}
    return [list(blocks) for blocks in answer["remote_block_ids"]]


def read_by(
    engine: DecodeEngine, prompt: Iterable[int], offered: Sequence[Sequence[int]]
) -> tuple[list[int], list[int]]:
    """The blocks of the first layer that a request reads, ours and P's."""
    engine.ask("asked", prompt, offered)
    engine.step()
    [read] = nixl_of(engine.worker).reads
    blocks = range(engine.worker.num_blocks)
    layer = len([index for index in read.remote if index in blocks])
    return read.local[:layer], read.remote[:layer]


@pytest.mark.parametrize(("length", "tokens"), [(197, 20), (10, 20), (32, 2), (40, 100)])
def test_what_p_generated_is_not_read(length: int, tokens: int) -> None:
    prompt = range(length)
    [named] = offered = answered(prompt, tokens)
    engine = DecodeEngine()
    connect(engine.worker, "P")
    local, remote = read_by(engine, prompt, offered)
    assert remote == named[: -(-length // 16)]
    assert len(local) == len(remote)


@pytest.mark.parametrize("hit", [1, 5, 12])
def test_nor_is_it_after_a_prefix_hit(hit: int) -> None:
    engine = DecodeEngine()
    connect(engine.worker, "P")
    engine.ask("before", PROMPT[: hit * 16 + 1], max_tokens=1)
    engine.step()
    _, remote = read_by(engine, PROMPT, [NAMED])
    assert remote == list(NAMED[hit:13])


@pytest.mark.parametrize("tp_size", [2, 4])
def test_each_rank_of_p_is_read_so(tp_size: int) -> None:
    engine = DecodeEngine()
    connect(engine.worker, "P", tp_size=tp_size)
    engine.ask("asked", PROMPT, [NAMED], tp_size=tp_size)
    engine.step()
    for read in nixl_of(engine.worker).reads:
        assert set(NAMED[13:]).isdisjoint(read.remote)
        assert set(NAMED[:13]) <= set(read.remote)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_window_that_p_has_left_behind_fails_the_receive(policy: Any) -> None:  # noqa: ANN401 - a literal
    """P names the blocks of the last window of its tokens, and the prompt's begins before it."""
    engine = DecodeEngine(groups=("full", "sliding"), policy=policy)
    connect(engine.worker, "P")
    engine.ask("asked", PROMPT, [NAMED, range(50, 53)])
    steps = [engine.step() for _ in range(4)]
    assert nixl_of(engine.worker).reads == []
    computed = [step.computed["asked"] for step in steps if "asked" in step.computed]
    finished = [step.finished["asked"] for step in steps if "asked" in step.finished]
    if policy == "recompute":
        assert computed[0] == (0, len(PROMPT))
    else:
        assert (computed, finished) == ([], ["error"])


def test_a_window_that_p_still_has_is_read() -> None:
    engine = DecodeEngine(groups=("full", "sliding"))
    connect(engine.worker, "P")
    engine.ask("asked", range(10), [[30, 31], [50, 51]])
    engine.step()
    [read] = nixl_of(engine.worker).reads
    assert {30, 50} <= set(read.remote)
    assert {31, 51}.isdisjoint(read.remote)

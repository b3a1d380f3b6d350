"""46694: D reads what P has into the blocks of the prompt, not into what it reserves behind them.

A D that guesses with a draft model reserves slots for the guesses when it begins to load. For some
lengths of the prompt they need a block more. A P that guesses fewer tokens has none there.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.support.decode_engine import DecodeEngine
from tests.support.nixl_worker import attempt, connect, nixl_of

ENDS_LATER = [30, 31, 46, 47]
"""Tokens of prompts after which three guesses need a block more, and one does not."""


def decoding(cached: Iterable[int] = ()) -> DecodeEngine:
    """One that guesses three tokens, and has computed a prompt that starts with these tokens."""
    engine = DecodeEngine()
    connect(engine.worker, "P", num_blocks=64)
    engine.guess(3)
    if cached:
        engine.ask("before", [*cached, 999], max_tokens=1)
        engine.step()
        engine.step()
    return engine


def named(length: int) -> list[int]:
    """The blocks that P names of a prompt."""
    return list(range(40, 40 + -(-length // 16)))


def where(engine: DecodeEngine) -> list[tuple[int, int]]:
    """Each block of P that is read, and at which place of the request's own it arrives."""
    [blocks] = engine.scheduler.kv_cache_manager.get_block_ids("asked")
    return [
        (theirs, blocks.index(ours))
        for read in nixl_of(engine.worker).reads
        for theirs, ours in zip(read.remote, read.local, strict=True)
        if theirs < 64  # the keys of the first layer
    ]


@pytest.mark.parametrize("length", ENDS_LATER)
@pytest.mark.parametrize("hits", [0, 1])
def test_a_block_arrives_where_it_was_on_p(length: int, hits: int) -> None:
    engine = decoding(cached=range(16 * hits))
    blocks = named(length)
    engine.ask("asked", range(length), [blocks])
    attempt(engine.step)
    assert where(engine) == [(block, i) for i, block in enumerate(blocks) if i >= hits]


@pytest.mark.parametrize("length", ENDS_LATER)
def test_the_answer_starts_from_what_was_received(length: int) -> None:
    engine = decoding()
    engine.ask("asked", range(length), [named(length)])
    computed: dict[str, tuple[int, int]] = {}
    for _ in range(6):
        step = attempt(engine.step)
        assert not isinstance(step, Exception)
        computed = computed or step.computed
        nixl = nixl_of(engine.worker)
        nixl.finish(*nixl.in_flight())
    # Guesses may be checked beside it.
    assert {name: start for name, (start, _) in computed.items()} == {"asked": length - 1}

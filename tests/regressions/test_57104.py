"""57104: with speculative decoding, loads that fill D's cache do not wait for each other for ever.

To run, a request needs slots for what its draft model guesses; while it is received it has none: in
0.23.0 and 0.24.0 with EAGLE and MTP, elsewhere with any.
"""

from __future__ import annotations

import pytest

from tests.support.decode_engine import DecodeEngine
from tests.support.nixl_worker import attempt, connect, nixl_of

PROMPT = 32
"""Tokens: two blocks, and a third for the guesses."""


def asked(count: int, *, priority: bool = False) -> DecodeEngine:
    """An engine with two blocks for each of so many requests, which it begins to receive.

    Args:
        count: of requests.
        priority: by priorities, instead of first come, first served.
    """
    engine = DecodeEngine(num_blocks=2 * count + 1)  # one more is the null block
    engine.guess(3, eagle=True)
    if priority:
        engine.serve_by_priority()
    connect(engine.worker, "P")
    for number in range(count):
        start = 1000 * number
        engine.ask(f"req-{number}", range(start, start + PROMPT), [[1, 2]], max_tokens=4)
    return engine


def run(engine: DecodeEngine, arrive: int) -> dict[str, str]:
    """Let the reads end, so many in one step.

    Returns:
        why those requests ended that did.
    """
    ended: dict[str, str] = {}
    for _ in range(60):
        for read in nixl_of(engine.worker).in_flight()[:arrive]:
            read.state = "DONE"
        ended |= engine.step().finished
    return ended


@pytest.mark.parametrize("arrive", [1, 9])
@pytest.mark.parametrize("priority", [False, True])
@pytest.mark.parametrize("count", [2, 4])
def test_every_request_ends(count: int, arrive: int, priority: bool) -> None:
    ended = attempt(run, asked(count, priority=priority), arrive)
    assert ended == {f"req-{number}": "length" for number in range(count)}


def test_no_block_stays_held() -> None:
    engine = asked(3)
    attempt(run, engine, 9)
    assert len(engine._reusable()) == 6

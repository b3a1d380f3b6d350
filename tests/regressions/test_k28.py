"""K28: who has received its prompt does not wait for one whose receive has failed.

Several KV-cache groups, and a cache that is nearly full. The failed request is computed anew, for
which it needs more blocks than it received into: a window's group holds all of a prompt until that
is computed. Those blocks are the others', until they have run.
"""

from __future__ import annotations

import pytest

from tests.support.decode_engine import DecodeEngine
from tests.support.nixl_worker import connect, nixl_of

LOST = 128
"""Tokens: 16 blocks in two groups when they are computed, 10 when they are received."""

OTHER = 32
"""Tokens: 4 blocks, and 2 more for what is generated."""


def receiving(*others: str, num_blocks: int = 19) -> DecodeEngine:
    """An engine that receives for a request from a P of its own, and for others."""
    engine = DecodeEngine(groups=("full", "sliding"), num_blocks=num_blocks)
    for peer in ("P", "Q"):  # a read that fails says something about its own peer
        connect(engine.worker, peer)
    engine.ask("lost", range(LOST), [list(range(1, 9))] * 2, engine_id="Q")
    for number, req_id in enumerate(others, start=1):
        start = 1000 * number
        engine.ask(req_id, range(start, start + OTHER), [[1, 2]] * 2)
    engine.step()
    return engine


def ended(engine: DecodeEngine, req_id: str, *, fails: bool = False) -> None:
    """The read for a request ends."""
    nixl = nixl_of(engine.worker)
    (read,) = (one for one in nixl.in_flight() if one.notif.startswith(f"{req_id}-".encode()))
    (nixl.fail if fails else nixl.finish)(read)


def run(engine: DecodeEngine, steps: int = 12) -> dict[str, int]:
    """Go on for so many steps; who ended, and which of its tokens was the first to be computed."""
    begun: dict[str, int] = {}
    ended: list[str] = []
    for step in (engine.step() for _ in range(steps)):
        begun = {req_id: start for req_id, (start, _) in step.computed.items()} | begun
        ended += step.finished
    return {req_id: begun[req_id] for req_id in ended}


@pytest.mark.parametrize("first", [True, False], ids=["fails-first", "fails-last"])
def test_those_that_have_received_run(first: bool) -> None:
    engine = receiving("one", "two")
    if first:
        ended(engine, "lost", fails=True)
        assert run(engine, 2) == {}
    for req_id in ("one", "two"):
        ended(engine, req_id)
    if not first:
        ended(engine, "lost", fails=True)
    begun = run(engine)
    assert set(begun) == {"lost", "one", "two"}
    assert (begun["one"], begun["two"]) == (OTHER - 1, OTHER - 1), "what came is used"


def test_so_does_one_behind_another_that_still_receives() -> None:
    engine = receiving("one", "two")
    ended(engine, "lost", fails=True)
    ended(engine, "two")
    assert "two" in run(engine)
    ended(engine, "one")
    run(engine)
    assert not engine.scheduler.requests


@pytest.mark.parametrize("others", [(), ("one",)], ids=["alone", "before-another"])
def test_several_that_fail_at_once_make_room_for_each_other(others: tuple[str, ...]) -> None:
    """As all do that receive from a P that dies."""
    engine = receiving(num_blocks=23 + 4 * len(others))
    blocks = list(range(11, 19))
    engine.ask("too", range(5000, 5000 + LOST), [blocks] * 2, engine_id="Q")
    for number, req_id in enumerate(others, start=1):
        start = 1000 * number
        engine.ask(req_id, range(start, start + OTHER), [[1, 2]] * 2)
    engine.step()
    for req_id in ("lost", "too"):
        ended(engine, req_id, fails=True)
    for req_id in others:
        ended(engine, req_id)
    assert set(run(engine, 6)) == {"lost", "too", *others}, "no step stands still meanwhile"

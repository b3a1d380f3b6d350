"""K12: telling a P that is not connected never holds up a read from another."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.side_channel import Fleet, silent


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with Fleet() as fleet:
        yield fleet


def test_a_read_is_not_behind_peers_that_do_not_answer() -> None:
    with Fleet(hurried=True) as fleet:
        for i in range(12):
            fleet.serve(f"silent-{i}", answers=silent)
            fleet.leave(f"left-{i}", f"silent-{i}")
        fleet.serve("P")
        fleet.read()
        assert fleet.until(fleet.reads), "the read has not begun"
        assert fleet.reads() == ["P/0"]


def test_a_read_is_not_behind_a_peer_that_answers_for_some_of_its_ranks(fleet: Fleet) -> None:
    half = fleet.serve("half", tp_size=2, answers=lambda rank: rank == 0)
    fleet.leave("left", "half", tp_size=2)
    assert fleet.until(lambda: half.asked == [0, 1])
    fleet.serve("P")
    fleet.read()
    assert fleet.until(fleet.reads), "the read has not begun"


def test_a_read_does_not_wait_for_a_notification_to_the_same_engine(fleet: Fleet) -> None:
    """A client that leaves can have named any place for it."""
    fleet.serve("P", answers=silent)
    fleet.leave("left", "P")
    fleet.serve("P")
    fleet.read()
    assert fleet.until(fleet.reads), "the read has not begun"
    assert fleet.until(fleet.heard)
    assert fleet.heard() == {"P/0": [b"left-at-p:1"]}, "whoever connects serves both"


def test_peers_of_requests_that_stay_do_not_answer_for_as_long_as_the_operator_says() -> None:
    with Fleet(hurried=True, extra_config={"max_handshake_wait": 1}) as fleet:
        for i in range(3):
            fleet.serve(f"silent-{i}", answers=silent)
            fleet.read(f"silent-{i}", f"stays-{i}")
        # vLLM waits 5 s for the first of them.
        over = fleet.until(lambda: not fleet.worker._handshake_futures, 9.0)
        assert over, "three peers are waited for"
        fleet.serve("P")
        fleet.read()
        assert fleet.until(fleet.reads), "the read has not begun"

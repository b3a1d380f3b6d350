"""K01: a failed request is reported once, after its last read in flight has ended.

What the scheduler hears reported it computes anew or frees: it hands the blocks on. A read that
is still in flight then writes into somebody else's blocks, and nothing looks wrong.
"""

from __future__ import annotations

import functools
import time

import pytest

from tests.support.nixl_release import NixlConnectorWorker
from tests.support.nixl_worker import (
    agent_name,
    attempt,
    await_handshakes,
    connect,
    make_worker,
    nixl_of,
    raising,
    receive,
    received,
    register_peer,
    script_handshake,
    step,
)
from tests.support.receive_machine import broken_claim

CALLS = ("make_prepped_xfer", "transfer")


def reading_from_two_ranks(call: str, refused: int) -> NixlConnectorWorker:
    """A worker that was asked to receive "req-d"; NIXL refused the call for one rank's read."""
    worker = make_worker()
    connect(worker, "P", tp_size=2)
    nixl = nixl_of(worker)
    made: list[str] = []

    def is_refused(*args: object) -> bool:
        if call == "transfer":
            return nixl.reads[-1].agent == agent_name("P", refused)
        made.append(str(args[0]))
        return made[-1] == agent_name("P", refused)

    nixl.on[call] = raising(RuntimeError("no route"), is_refused)
    assert attempt(receive, worker, "req-d", local_blocks=[[1, 2]], tp_size=2) is None
    del nixl.on[call]
    return worker


@pytest.mark.parametrize("end", ["DONE", "ERR"])
@pytest.mark.parametrize("call", CALLS)
def test_nothing_is_reported_while_another_rank_still_writes(call: str, end: str) -> None:
    worker = reading_from_two_ranks(call, refused=1)
    nixl = nixl_of(worker)
    [in_flight] = nixl.in_flight()
    for _ in range(3):
        assert attempt(step, worker) == (set(), set())
    nixl.finish(in_flight) if end == "DONE" else nixl.fail(in_flight)
    assert received(worker) == {"req-d"}
    assert worker.get_block_ids_with_load_errors() == {1, 2}
    assert attempt(step, worker) == (set(), set())
    assert nixl.misuse == []


@pytest.mark.parametrize("call", CALLS)
def test_no_further_read_is_posted_for_a_request_that_failed(call: str) -> None:
    worker = reading_from_two_ranks(call, refused=0)
    assert nixl_of(worker).in_flight() == []
    assert received(worker) == {"req-d"}
    assert attempt(step, worker) == (set(), set())


def test_a_request_that_fails_between_two_ranks_is_reported_when_the_first_has_ended() -> None:
    worker = make_worker()
    connect(worker, "P", tp_size=2)
    del worker.dst_xfer_side_handles["P"][1]  # as after a handshake that ended half way
    assert attempt(receive, worker, "req-d", local_blocks=[[1, 2]], tp_size=2) is None
    [in_flight] = nixl_of(worker).in_flight()
    assert attempt(step, worker) == (set(), set())
    nixl_of(worker).finish(in_flight)
    assert received(worker) == {"req-d"}
    assert attempt(step, worker) == (set(), set())


def test_the_id_can_be_used_again_after_the_report() -> None:
    worker = reading_from_two_ranks("transfer", refused=1)
    nixl = nixl_of(worker)
    assert attempt(step, worker) == (set(), set())
    nixl.finish(*nixl.in_flight())
    assert received(worker) == {"req-d"}
    assert worker.get_block_ids_with_load_errors() == {1, 2}
    script_handshake(worker, functools.partial(register_peer, worker))  # with 55471
    assert attempt(receive, worker, "req-d", local_blocks=[[3, 4]], tp_size=2) is None
    await_handshakes(worker)
    for _ in range(100):  # with 55471, as long as it is tried whether P is there
        assert attempt(step, worker) == (set(), set())
        if nixl.in_flight():
            break
        time.sleep(0.01)
    assert len(nixl.in_flight()) == 2
    nixl.finish(*nixl.in_flight())
    assert received(worker) == {"req-d"}
    assert worker.get_block_ids_with_load_errors() == set()


def test_in_any_order_of_events_a_receive_is_reported_once_and_after_its_reads() -> None:
    broken = broken_claim(1_000, faults={"posting", "reading"}, claims={"lives", "once"})
    assert not broken, broken

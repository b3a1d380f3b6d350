"""K20: what D reads of blocks that P does not hold any more is not used."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.support.decode_engine import Step
from tests.support.lease_pair import (
    PrefillServer,
    Server,
    computed_of,
    decode_server,
    prefill_server,
)
from tests.support.nixl_worker import nixl_of

PROMPT = list(range(40))
SECONDS = 5.0
"""In which a request has to come to its end."""


@pytest.fixture
def p() -> Iterator[PrefillServer]:
    with prefill_server() as server:
        yield server


def read_to_the_end(d: Server) -> list[Step]:
    """Let the reads end, and step until all requests have."""
    nixl = nixl_of(d.worker)
    nixl.finish(*nixl.in_flight())
    steps = []
    end = time.monotonic() + SECONDS
    while d.scheduler.has_requests() and time.monotonic() < end:
        steps.append(d.step())
        time.sleep(0.001)
    assert not d.scheduler.has_requests(), "the request does not come to its end"
    return steps


def begun(d: Server, req_id: str, offer: dict[str, object]) -> None:
    """Send a request, and have D's worker post its read."""
    d.send(req_id, PROMPT, offer)
    d.step()
    d.step()


def test_a_read_that_outlives_its_lease_is_computed(p: PrefillServer) -> None:
    offer = p.prefill("asked", PROMPT)
    d = decode_server()
    begun(d, "late", offer)
    p.outlive_leases()
    assert computed_of(read_to_the_end(d), "late") >= len(PROMPT)


def test_a_read_that_begins_after_its_lease_is_computed(p: PrefillServer) -> None:
    offer = p.prefill("asked", PROMPT)
    p.outlive_leases()
    d = decode_server()
    begun(d, "late", offer)
    assert computed_of(read_to_the_end(d), "late") >= len(PROMPT)


def test_with_the_policy_fail_the_request_fails(p: PrefillServer) -> None:
    offer = p.prefill("asked", PROMPT)
    d = decode_server(policy="fail")
    begun(d, "late", offer)
    p.outlive_leases()
    ends = {req_id: why for step in read_to_the_end(d) for req_id, why in step.finished.items()}
    assert ends == {"late": "error"}


def test_of_two_readers_the_one_that_is_late_computes() -> None:
    """A router has given the request to two decode servers; P frees when it hears of one."""
    with prefill_server(lease=30.0) as p:
        offer = p.prefill("asked", PROMPT)
        quick, late = decode_server("quick/0"), decode_server("late/0")
        begun(quick, "quick", offer)
        assert computed_of(read_to_the_end(quick), "quick") < len(PROMPT)
        p.hears_of(quick)
        begun(late, "late", offer)
        assert computed_of(read_to_the_end(late), "late") >= len(PROMPT)


def test_what_a_restarted_server_does_not_know_is_computed(p: PrefillServer) -> None:
    offer = p.prefill("asked", PROMPT)
    p.leave()
    with prefill_server() as restarted:
        d = decode_server()
        begun(d, "late", offer | {"remote_port": restarted.part.side_channel_port})
        assert computed_of(read_to_the_end(d), "late") >= len(PROMPT)

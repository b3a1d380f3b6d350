"""44424: of a P that is gone D keeps nothing for ever."""

from __future__ import annotations

import time

from tests.support.nixl_release import NixlConnectorWorker
from tests.support.nixl_worker import (
    await_handshakes,
    connect,
    make_worker,
    nixl_of,
    receive,
    register_peer,
    script_handshake,
    step,
)

TTL = 0.05
"""Seconds; by default an hour."""


def decoder(ttl: float = TTL) -> NixlConnectorWorker:
    """A worker that knows P, and that any other engine answers."""
    worker = make_worker(extra_config={"engine_ttl": ttl})
    connect(worker, "P")
    script_handshake(worker, lambda engine_id, tp_size: register_peer(worker, engine_id, tp_size))
    return worker


def read_from(worker: NixlConnectorWorker, engine_id: str) -> None:
    """Receive a request's blocks, to the end."""
    receive(worker, f"of-{engine_id}", engine_id=engine_id)
    await_handshakes(worker)
    step(worker)
    nixl_of(worker).finish(*nixl_of(worker).in_flight())
    assert step(worker)[1] == {f"of-{engine_id}"}


def test_an_engine_that_is_gone_is_forgotten_before_another_is_met() -> None:
    worker = decoder()
    read_from(worker, "P")
    gone = list(worker.dst_xfer_side_handles["P"].values())
    time.sleep(2 * TTL)
    read_from(worker, "Q")
    assert nixl_of(worker).called("remove_remote_agent") == [("P/0",)]
    assert nixl_of(worker).called("release_dlist_handle") == [(handle,) for handle in gone]
    assert worker.dst_xfer_side_handles.keys() - {worker.engine_id} == {"Q"}


def test_many_come_and_go() -> None:
    worker = decoder()
    for number in range(6):
        read_from(worker, f"P-{number}")
        time.sleep(2 * TTL)
    assert len(nixl_of(worker).called("remove_remote_agent")) == 6  # P, and all but the last
    assert len(worker._remote_agents) == 1


def test_one_that_comes_back_is_met_as_at_first() -> None:
    worker = decoder()
    read_from(worker, "P")
    time.sleep(2 * TTL)
    read_from(worker, "Q")
    time.sleep(2 * TTL)
    read_from(worker, "P")
    read_from(worker, "P")
    assert worker._remote_agents.keys() == {"P"}
    assert nixl_of(worker).misuse == []

"""55471: after a failed read D shakes hands with that engine anew.

A P that is restarted under its engine id has another NIXL agent and other descriptors. NIXL says
that the old ones are gone, as it does when a connection is lost; D has to ask P for the new ones.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from tests.support import nixl_worker
from tests.support.nixl_release import NixlConnectorWorker
from tests.support.nixl_worker import (
    ScriptedNixl,
    await_handshakes,
    connect,
    make_worker,
    nixl_of,
    raising,
    receive,
    register_peer,
    script_handshake,
    step,
)

BROKEN = RuntimeError("remote disconnected")


@pytest.fixture(autouse=True)
def side_channel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """P's accepts connections, as that of a P that is there."""
    usual = nixl_worker.peer_port
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        monkeypatch.setattr(
            nixl_worker, "peer_port", lambda engine: port if engine == "P" else usual(engine)
        )
        yield


HOWS = ["cannot be made", "cannot be posted", "ends in an error", "cannot be polled"]


def break_reads(nixl: ScriptedNixl, how: str, agent: str = "P/0") -> None:
    """Let every read from an agent from now on fail in one of the ways in which NIXL says so."""
    vars(nixl)["check_remote_metadata"] = lambda name, *descs: name != agent

    def reads_it(handle: int) -> bool:
        return any(read.handle == handle and read.agent == agent for read in nixl.reads)

    if how == "cannot be made":
        nixl.on["make_prepped_xfer"] = raising(BROKEN, lambda of, *_: of == agent)
    elif how == "cannot be posted":
        nixl.on["transfer"] = raising(BROKEN, reads_it)
    elif how == "ends in an error":
        nixl.on["check_xfer_state"] = lambda handle: "ERR" if reads_it(handle) else None
    else:
        nixl.on["check_xfer_state"] = raising(BROKEN, reads_it)


def restart(worker: NixlConnectorWorker, engine_id: str = "P") -> list[str]:
    """Let an engine answer handshakes as one that has just started; return which it answered."""
    answered: list[str] = []

    def answer(asked: str, tp_size: int) -> dict[object, str]:
        answered.append(asked)
        name = f"{asked}/{len(answered)} anew"
        return register_peer(worker, asked, tp_size, agent_metadata=name.encode())

    script_handshake(worker, answer)
    return answered


def lose(worker: NixlConnectorWorker, req_id: str = "lost") -> set[str]:
    """Have one receive fail, and return what is reported."""
    receive(worker, req_id, local_blocks=[[1]], remote_blocks=[[5]])
    return worker.get_finished()[1]


def go_on(worker: NixlConnectorWorker) -> None:
    """Steps in which nothing is asked for, until D has let P's agent go, or for a second."""
    for _ in range(100):
        step(worker)
        if nixl_of(worker).called("remove_remote_agent"):
            break
        time.sleep(0.01)


@pytest.mark.parametrize("how", HOWS)
def test_the_next_request_reads_from_the_engine_that_came_back(how: str) -> None:
    worker = make_worker()
    connect(worker, "P")
    nixl = nixl_of(worker)
    answered = restart(worker)
    break_reads(nixl, how)
    lose(worker)
    go_on(worker)
    worker.get_block_ids_with_load_errors()
    receive(worker, "req-d", local_blocks=[[2]], remote_blocks=[[6]])
    await_handshakes(worker)
    step(worker)
    assert answered == ["P"]
    assert [read.agent for read in nixl.reads if read.posted][-1:] == ["P/1 anew"]
    nixl.finish(*(read for read in nixl.reads if read.agent == "P/1 anew"))
    assert step(worker)[1] == {"req-d"}
    assert worker.get_block_ids_with_load_errors() == set()
    assert nixl.misuse == []


@pytest.mark.parametrize("how", HOWS)
def test_what_nixl_held_of_the_engine_that_is_gone_is_given_back(how: str) -> None:
    worker = make_worker()
    connect(worker, "P")
    connect(worker, "Q")
    nixl = nixl_of(worker)
    restart(worker)
    break_reads(nixl, how)
    gone, kept = (list(worker.dst_xfer_side_handles[one].values()) for one in "PQ")
    lose(worker)
    go_on(worker)
    receive(worker, "req-d", local_blocks=[[2]], remote_blocks=[[6]])
    assert nixl.called("remove_remote_agent") == [("P/0",)]
    assert nixl.called("release_dlist_handle") == [(handle,) for handle in gone]
    assert list(worker.dst_xfer_side_handles["Q"].values()) == kept


def test_of_two_ranks_one_is_lost() -> None:
    """The other goes on answering, so that only one of two reads fails."""
    worker = make_worker()
    connect(worker, "P", tp_size=2)
    nixl = nixl_of(worker)
    asked: list[str] = []

    def answer(engine_id: str, tp_size: int) -> dict[object, str]:
        asked.append(engine_id)
        return register_peer(worker, engine_id, tp_size)

    script_handshake(worker, answer)
    break_reads(nixl, "cannot be posted", "P/1")
    receive(worker, "lost", local_blocks=[[1]], remote_blocks=[[5]], tp_size=2)
    nixl.finish(*nixl.in_flight())
    go_on(worker)
    nixl.on.clear()
    vars(nixl).pop("check_remote_metadata")
    receive(worker, "req-d", local_blocks=[[2]], remote_blocks=[[6]], tp_size=2)
    await_handshakes(worker)
    step(worker)
    assert asked == ["P"]
    assert sorted(nixl.called("remove_remote_agent")) == [("P/0",), ("P/1",)]
    assert {read.agent for read in nixl.in_flight()} == {"P/0", "P/1"}

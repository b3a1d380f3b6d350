"""Pulls that fail: the request, not the engine, and every rank of P that waits is told, once."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.nixl_release import NixlConnectorWorker
from tests.support.nixl_worker import (
    agent_name,
    connect,
    lives,
    make_worker,
    nixl_of,
    raising,
    receive,
    step,
)

pytest.importorskip(
    "vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker",
    reason="from 0.30.0 on; up to 0.29.0 see test_receive.py",
)


def pulling(ranks: int = 2) -> Any:  # noqa: ANN401 - the worker
    """A worker in the middle of a receive from each rank of P."""
    worker = make_worker(num_blocks=16)
    connect(worker, "P", tp_size=ranks)
    lives(receive, worker, tp_size=ranks)
    assert len(nixl_of(worker).reads) == ranks
    return worker


def heard(worker: Any) -> dict[str, int]:  # noqa: ANN401
    """How often each agent of P has heard of the request."""
    return {agent: len(words) for agent, words in nixl_of(worker).heard.items()}


ONCE = {agent_name("P", 0): 1, agent_name("P", 1): 1}


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("first", ["the bad one", "the good one"])
def test_a_rank_whose_read_failed_is_told_and_the_other_heard_from_nixl(
    bad: int, first: str
) -> None:
    worker = pulling()
    nixl = nixl_of(worker)
    ends: set[str] = set()
    for failing in (True, False) if first == "the bad one" else (False, True):
        assert not ends, "reported while a read is in flight"
        if failing:
            nixl.fail(nixl.reads[bad])
        else:
            nixl.finish(nixl.reads[1 - bad])
        ends |= lives(step, worker)[1]
    for _ in range(2):
        ends |= lives(step, worker)[1]
    assert ends == {"req-d"}
    assert worker.get_block_ids_with_load_errors() == {1, 2}
    assert heard(worker) == ONCE
    assert set(nixl.heard[agent_name("P", bad)]) == {b"req-p:1"}


def test_when_all_is_well_nobody_is_told_twice() -> None:
    worker = pulling()
    nixl_of(worker).finish(*nixl_of(worker).reads)
    assert lives(step, worker) == (set(), {"req-d"})
    assert heard(worker) == ONCE
    assert not worker.get_block_ids_with_load_errors()


def test_a_peer_that_cannot_be_told_costs_a_count() -> None:
    worker = pulling()
    nixl = nixl_of(worker)
    nixl.on["send_notif"] = raising(RuntimeError("gone"))
    nixl.fail(*nixl.reads)
    ends: set[str] = set()
    for _ in range(3):
        ends |= lives(step, worker)[1]
    assert ends == {"req-d"}
    stats = worker.get_kv_connector_stats()
    assert sum(stats.data["num_failed_notifications"]) == 2


def test_what_p_said_makes_no_sense_here() -> None:
    worker = make_worker(num_blocks=16)
    connect(worker)
    lives(receive, worker, local_blocks=[[1, 2, 3]], remote_blocks=[[5]])
    ends: set[str] = set()
    for _ in range(3):
        ends |= lives(step, worker)[1]
    assert ends == {"req-d"}
    assert worker.get_block_ids_with_load_errors() == {1, 2, 3}
    lives(receive, worker, "next")
    nixl = nixl_of(worker)
    nixl.finish(*nixl.in_flight())
    assert lives(step, worker)[1] == {"next"}


def test_a_handle_that_nixl_keeps_stops_no_shutdown() -> None:
    worker = pulling()
    nixl = nixl_of(worker)
    nixl.on["release_xfer_handle"] = raising(RuntimeError("busy"))
    worker.shutdown()
    assert len(nixl.called("release_xfer_handle")) >= 2
    assert nixl.called("deregister_memory")
    assert nixl.misuse == []


@pytest.mark.skipif(
    not hasattr(NixlConnectorWorker, "_cleanup_remote_engines"),
    reason="upstream does not look whether NIXL still knows a peer",
)
def test_a_peer_that_nixl_has_dropped_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can reach it, until the next handshake, and that is for the next request."""
    worker = make_worker()
    connect(worker, tp_size=2)
    nixl = nixl_of(worker)
    monkeypatch.setattr(nixl, "check_remote_metadata", lambda agent: False)
    receive(worker, "reads", tp_size=2)
    failed, flies = nixl.reads
    nixl.fail(failed)
    assert lives(step, worker)[1] == set()
    receive(worker, "hits", local_blocks=[[]], remote_request_id="req-q", tp_size=2)
    receive(worker, "comes late", remote_request_id="req-r", tp_size=2)
    assert lives(step, worker)[1] == {"comes late"}
    nixl.fail(flies)
    assert lives(step, worker)[1] == {"reads"}
    assert nixl.called("send_notif") == []

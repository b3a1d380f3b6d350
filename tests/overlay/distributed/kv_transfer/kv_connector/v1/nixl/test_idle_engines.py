"""Up to 0.23.0: what is forgotten of engines, and what is not."""

from __future__ import annotations

import time
from importlib import import_module

import pytest

from tests.regressions.test_44424 import TTL, decoder, read_from
from tests.support.nixl_release import NixlConnectorMetadata, NixlConnectorWorker
from tests.support.nixl_worker import await_handshakes, nixl_of, receive, step
from tests.support.release import since

pytest.importorskip(
    "vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.idle_engines", reason="up to 0.23.0"
)


def meets_another_later(worker: NixlConnectorWorker) -> set[str]:
    """Read from P, do nothing for a while, and read from Q; which engines are known then?"""
    read_from(worker, "P")
    time.sleep(2 * TTL)
    read_from(worker, "Q")
    return set(worker._remote_agents)


def test_one_stays_as_long_as_a_read_is_under_way() -> None:
    worker = decoder()
    receive(worker, "long")
    [read] = nixl_of(worker).in_flight()
    time.sleep(2 * TTL)
    receive(worker, "of-Q", engine_id="Q")
    await_handshakes(worker)
    assert nixl_of(worker).called("remove_remote_agent") == []
    nixl_of(worker).finish(read)
    assert "long" in step(worker)[1]
    nixl_of(worker).finish(*nixl_of(worker).in_flight())
    assert step(worker)[1] == {"of-Q"}
    read_from(worker, "R")
    assert "P" not in worker._remote_agents


def test_a_request_for_it_begins_with_a_handshake() -> None:
    worker = decoder()
    assert meets_another_later(worker) == {"Q"}
    read_from(worker, "P")
    assert "P" in worker._remote_agents
    assert nixl_of(worker).misuse == []


@pytest.mark.skipif(not since("0.22.0"), reason="earlier ones have no heartbeats")
def test_one_that_a_heartbeat_meets_makes_room_as_well() -> None:
    """A request that waits for blocks is not read, but its lease is prolonged."""
    worker = decoder()
    read_from(worker, "P")
    time.sleep(2 * TTL)
    said = import_module("vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata")
    metadata = NixlConnectorMetadata()
    metadata.heartbeat_by_engine["Q"] = said.HeartbeatInfo({"r"}, "127.0.0.1", 1, 1)
    worker.start_load_kv(metadata)
    await_handshakes(worker)
    assert set(worker._remote_agents) == {"Q"}
    read_from(worker, "Q")
    assert nixl_of(worker).misuse == []


def test_nothing_is_forgotten_as_long_as_no_other_is_met() -> None:
    worker = decoder()
    read_from(worker, "P")
    read_from(worker, "Q")
    time.sleep(2 * TTL)
    read_from(worker, "Q")
    assert worker._remote_agents.keys() == {"P", "Q"}


@pytest.mark.parametrize("ttl", [0, -1, "soon", None, [1], 3600])
def test_nothing_is_forgotten_otherwise(ttl: float) -> None:
    assert meets_another_later(decoder(ttl)) == {"P", "Q"}


def test_by_default_it_takes_an_hour_without_a_read(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = decoder()
    worker.vllm_config.kv_transfer_config.kv_connector_extra_config.clear()
    began = time.perf_counter()
    for later, engine_id, known in [
        (0, "P", {"P"}),
        (0, "Q", {"P", "Q"}),
        (3000, "Q", {"P", "Q"}),
        (3590, "R", {"P", "Q", "R"}),
        (3610, "S", {"Q", "R", "S"}),
    ]:
        monkeypatch.setattr(time, "perf_counter", lambda now=began + later: now)
        read_from(worker, engine_id)
        assert worker._remote_agents.keys() == known


def test_a_peer_that_calls_itself_as_we_do_is_left_alone() -> None:
    worker = decoder()
    worker._remote_agents[worker.engine_id] = {}
    assert meets_another_later(worker) == {worker.engine_id, "Q"}


def test_names_that_clients_make_up_are_not_kept() -> None:
    worker = decoder()
    for number in range(50):
        receive(worker, f"bad-{number}", engine_id=f"nobody-{number}")
    await_handshakes(worker)
    step(worker)
    worker._remote_agents.clear()
    receive(worker, "last", engine_id="Q")
    assert worker._engine_last_active.keys() == {"Q"}

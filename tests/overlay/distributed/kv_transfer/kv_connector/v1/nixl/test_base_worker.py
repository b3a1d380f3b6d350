"""What a worker owes NIXL and its statistics, however a transfer or a handshake ends."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.support.nixl_worker import (
    await_handshakes,
    connect,
    make_worker,
    nixl_of,
    raising,
    receive,
    script_handshake,
    step,
)

base_worker = pytest.importorskip(
    "vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.base_worker",
    reason="from 0.24.0 on",
)


def counted(worker: Any, what: str) -> int:  # noqa: ANN401 - the worker
    stats = worker.get_kv_connector_stats()
    return sum(stats.data[what]) if stats is not None else 0


def test_a_failed_handshake_is_counted_by_the_main_thread() -> None:
    worker = make_worker()
    if not hasattr(worker.xfer_stats, "record_failed_handshake"):
        pytest.skip("from 0.31.0 on")
    threads = []
    record = worker.xfer_stats.record_failed_handshake

    def recorded() -> None:
        threads.append(threading.current_thread())
        record()

    worker.xfer_stats.record_failed_handshake = recorded

    def fail(engine_id: str, tp_size: int) -> dict[Any, str]:
        raise ConnectionError("nobody there")

    script_handshake(worker, fail)
    receive(worker)
    await_handshakes(worker)
    assert threads == []
    step(worker)
    assert threads == [threading.main_thread()]
    assert counted(worker, "num_failed_handshakes") == 1
    step(worker)
    assert len(threads) == 1, "once"


@pytest.mark.parametrize("refused", ["get_xfer_telemetry", "release_xfer_handle"])
def test_the_kv_of_a_read_that_is_done_is_there(
    refused: str, caplog: pytest.LogCaptureFixture
) -> None:
    worker = make_worker()
    connect(worker)
    nixl = nixl_of(worker)
    nixl.on[refused] = raising(RuntimeError("not now"))
    receive(worker)
    nixl.finish(*nixl.reads)
    assert step(worker) == (set(), {"req-d"})
    assert not worker.get_block_ids_with_load_errors()
    assert counted(worker, "num_failed_transfers") == 1
    assert "_failed" in caplog.text
    if refused != "release_xfer_handle" or hasattr(worker, "_recv_failures"):
        assert "req-d" in caplog.text  # up to 0.29.0 a handle is given back whoever it was for
    assert nixl.called("release_xfer_handle")
    if hasattr(worker, "_receives"):  # up to 0.29.0
        assert not worker._receives._rank_read, "nothing is kept of it"


def test_all_that_is_left_is_given_back_though_nixl_keeps_one() -> None:
    worker = make_worker()
    connect(worker)
    nixl = nixl_of(worker)
    receive(worker, "a")
    receive(worker, "b", local_blocks=[[3]], remote_blocks=[[7]])
    kept = nixl.reads[0].handle
    nixl.on["release_xfer_handle"] = raising(RuntimeError("busy"), when=lambda h: h == kept)
    base_worker.release_all(worker, worker._recving_transfers)
    assert [read.released for read in nixl.reads] == [False, True]
    assert counted(worker, "num_failed_transfers") == 1
    assert not any(worker._recving_transfers.values())
    assert nixl.misuse == []

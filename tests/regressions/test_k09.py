"""K09: a notification or handle release that raises costs a log line and a count, not the worker.

Whatever leaves `start_load_kv` or `get_finished` as an exception ends the engine and every
request on it. Neither a peer nor NIXL may have that power.
"""

from __future__ import annotations

import pytest

from tests.support.nixl_release import NixlConnectorWorker
from tests.support.nixl_worker import (
    attempt,
    connect,
    hold,
    make_worker,
    nixl_of,
    raising,
    rank_key,
    receive,
    received,
    sent,
    step,
)

BROKEN = RuntimeError("broken")

# Behind a request's id stands how many ranks D has; on 0.33.0, how many of them read from this one.
OF_READERS = rank_key(0) != 0
GOOD = b"req-p:1" if OF_READERS else b"req-p:2"
SENSELESS = [b"", b"\xff\xfe:1", b"req-p", b"req-p:", b"req-p:one", b"req-p:0", b"req-p:-1"]
if not OF_READERS:
    SENSELESS.append(b"req-p:3")  # D's ranks cannot be shared out among P's two


def reading() -> NixlConnectorWorker:
    worker = make_worker()
    connect(worker, "P")
    receive(worker, "req-d", local_blocks=[[1, 2]])
    return worker


def counted(worker: NixlConnectorWorker, what: str) -> int:
    return len(worker.xfer_stats.data[what])


def test_a_handle_that_cannot_be_released_does_not_take_back_what_has_arrived() -> None:
    worker = reading()
    nixl = nixl_of(worker)
    nixl.on["release_xfer_handle"] = raising(BROKEN)
    nixl.finish(*nixl.reads)
    assert received(worker) == {"req-d"}
    assert worker.get_block_ids_with_load_errors() == set()
    assert counted(worker, "num_failed_transfers") == 1


def test_telemetry_that_cannot_be_had_does_not_take_back_what_has_arrived() -> None:
    worker = reading()
    nixl = nixl_of(worker)
    nixl.on["get_xfer_telemetry"] = raising(BROKEN)
    nixl.finish(*nixl.reads)
    assert received(worker) == {"req-d"}
    assert worker.get_block_ids_with_load_errors() == set()
    assert counted(worker, "num_failed_transfers") == 1
    assert all(read.released for read in nixl.reads)


def test_a_nixl_without_telemetry_fails_no_read() -> None:
    worker = reading()
    nixl = nixl_of(worker)
    nixl.on["get_xfer_telemetry"] = raising(type("nixlNoTelemetryError", (Exception,), {})())
    nixl.finish(*nixl.reads)
    assert received(worker) == {"req-d"}
    assert worker.get_block_ids_with_load_errors() == set()
    assert counted(worker, "num_failed_transfers") == 0
    assert all(read.released for read in nixl.reads)


@pytest.mark.parametrize("poll", [lambda handle: "ERR", raising(BROKEN)], ids=["ERR", "raises"])
def test_a_failed_read_is_reported_when_its_handle_has_been_released(poll: object) -> None:
    worker = reading()
    nixl = nixl_of(worker)
    nixl.on["check_xfer_state"] = poll  # type: ignore[assignment]
    nixl.on["release_xfer_handle"] = raising(BROKEN)
    # Until then it may write: some parts of it failed, others may be under way.
    for _ in range(3):
        assert attempt(step, worker) == (set(), set())
    del nixl.on["release_xfer_handle"]
    assert received(worker) == {"req-d"}
    assert all(read.released for read in nixl.reads)
    assert worker.get_block_ids_with_load_errors() == {1, 2}
    assert attempt(step, worker) == (set(), set())
    assert nixl.misuse == []


def test_notifications_that_cannot_be_fetched_are_fetched_later() -> None:
    worker = make_worker(engine_id="P")
    nixl = nixl_of(worker)
    hold(worker, "req-p")
    nixl.on["get_new_notifs"] = raising(BROKEN)
    assert attempt(step, worker) == (set(), set())
    assert counted(worker, "num_failed_notifications") == 1
    del nixl.on["get_new_notifs"]
    nixl.inbox = {"D": [b"req-p:1"]}
    assert sent(worker) == {"req-p"}


@pytest.mark.parametrize("payload", SENSELESS)
def test_a_notification_that_makes_no_sense_is_dropped_and_the_others_are_not(
    payload: bytes,
) -> None:
    worker = make_worker(engine_id="P", tp_size=2)
    hold(worker, "req-p")
    nixl_of(worker).inbox = {"D": [payload, GOOD]}
    assert sent(worker) == {"req-p"}
    assert counted(worker, "num_failed_notifications") == 1


def test_a_worker_that_shuts_down_cleans_up_behind_a_handle_that_cannot_be_released() -> None:
    worker = reading()
    connect(worker, "Q")
    nixl = nixl_of(worker)
    nixl.on["release_xfer_handle"] = raising(BROKEN)
    try:
        assert attempt(worker.shutdown) is None
        assert len(nixl.called("remove_remote_agent")) == 2
        assert nixl.called("deregister_memory")
    finally:
        del nixl.on["release_xfer_handle"]

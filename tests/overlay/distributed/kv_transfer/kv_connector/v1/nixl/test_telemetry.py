"""What NIXL measured of a transfer, where it measures anything."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from unittest import mock

import pytest

from tests.support.nixl_release import NixlConnectorWorker
from tests.support.nixl_worker import connect, make_worker, nixl_of, raising, receive, step
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl import telemetry

NO_TELEMETRY = type("nixlNoTelemetryError", (Exception,), {})


@pytest.fixture
def worker() -> NixlConnectorWorker:
    made = make_worker()
    connect(made, "P")
    return made


def read(worker: NixlConnectorWorker, req_id: str) -> set[str]:
    receive(worker, req_id)
    nixl_of(worker).finish(*nixl_of(worker).in_flight())
    received: set[str] = step(worker)[1]
    return received


def nothing(handle: int) -> None:
    """What some builds have to say."""


@pytest.mark.parametrize("says", [nothing, raising(NO_TELEMETRY("off"))], ids=["None", "raises"])
def test_a_nixl_that_measures_nothing_fails_nothing(
    worker: NixlConnectorWorker, says: Callable[[int], None]
) -> None:
    nixl_of(worker).get_xfer_telemetry = says  # type: ignore[assignment, method-assign]
    with (
        mock.patch.object(telemetry.logger, "warning_once") as warning,
        mock.patch.object(worker, "_log_failure") as failure,
    ):
        assert [read(worker, req_id) for req_id in "ab"] == [{"a"}, {"b"}]
    assert not worker.get_block_ids_with_load_errors()
    assert worker.xfer_stats.is_empty()
    assert len({call.args for call in warning.call_args_list}) == 1, "once, as one and the same"
    assert failure.call_args_list == []
    assert all(read.released for read in nixl_of(worker).reads)


def test_what_is_measured_is_entered(worker: NixlConnectorWorker) -> None:
    measured = SimpleNamespace(xferDuration=2e6, postDuration=1e6, totalBytes=7, descCount=3)
    nixl_of(worker).on["get_xfer_telemetry"] = lambda handle: measured
    with mock.patch.object(telemetry.logger, "warning_once") as warning:
        read(worker, "a")
    assert not warning.called
    assert worker.xfer_stats.data["transfer_duration"] == [2.0]
    assert worker.xfer_stats.data["bytes_transferred"] == [7]
    assert worker.xfer_stats.data["num_failed_transfers"] == []


def test_any_other_exception_is_a_fault(worker: NixlConnectorWorker) -> None:
    nixl_of(worker).on["get_xfer_telemetry"] = raising(RuntimeError("broken"))
    with mock.patch.object(telemetry.logger, "warning_once") as warning:
        assert read(worker, "a") == {"a"}
    assert not warning.called
    assert worker.xfer_stats.data["num_failed_transfers"] == [1]

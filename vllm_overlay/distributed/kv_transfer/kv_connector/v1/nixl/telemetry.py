# SPDX-License-Identifier: Apache-2.0
"""All releases: what NIXL measured of a transfer, where it measures anything."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import ReqId, TransferHandle

logger = init_logger(f"vllm.{__name__}")

_Worker = Any
"""`NixlConnectorWorker`; from 0.24.0 on what those that pull and those that push are made of."""


def measure(worker: _Worker, req_id: ReqId, handle: TransferHandle) -> None:
    """Enter what NIXL measured of a transfer that completed into the worker's statistics.

    A build of NIXL may have no telemetry, whatever its agent is asked for: it raises, or has None
    to say. That is no fault of a transfer's. One that raises anything else costs a log line and a
    count.
    """
    try:
        measured = worker.nixl_wrapper.get_xfer_telemetry(handle)
        if measured is not None:
            worker.xfer_stats.record_transfer(measured)
            return
    except Exception as error:
        # The class is the binding's, which not every build of NIXL keeps in the same module.
        if type(error).__name__ != "nixlNoTelemetryError":
            worker._log_failure(failure_type="telemetry_failed", req_id=req_id, error=error)
            worker.xfer_stats.record_failed_transfer()
            return
    logger.warning_once(
        "NIXL measures no transfers here: its telemetry is off, or it was built without. vLLM's "
        "statistics of completed transfers (vllm:nixl_xfer_time_seconds and others) stay empty."
    )

# SPDX-License-Identifier: Apache-2.0
"""From 0.24.0 on: what hooks call in the part of the worker that pull and push share."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.telemetry import measure

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import (
        NixlBaseConnectorWorker,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
        ReqId,
        ReqMeta,
        TransferHandle,
    )


def count_later(worker: NixlBaseConnectorWorker) -> None:
    """Count a failed handshake; called by its thread, which must not touch the statistics."""
    # Made on demand, in one step: a test may make a worker without its constructor.
    vars(worker).setdefault("_failed_handshakes", queue.SimpleQueue()).put(1)


def count_failed_handshakes(worker: NixlBaseConnectorWorker) -> None:
    """Enter what the handshake thread has counted into the statistics."""
    waiting: queue.SimpleQueue[int] | None = vars(worker).get("_failed_handshakes")
    while waiting is not None and not waiting.empty():  # one consumer
        waiting.get_nowait()
        stats: Any = worker.xfer_stats  # counts them from 0.31.0 on
        stats.record_failed_handshake()


def handshake_failed(worker: Any, req_id: ReqId, meta: ReqMeta, error: Exception) -> None:  # noqa: ANN401
    """Hand a receive whose handshake has failed over to the main thread.

    Up to 0.29.0, where only a worker that pulls shakes hands for a request.
    """
    worker._receives.handshake_failed(req_id, meta, error)


def take_ready(worker: Any, start: Callable[[ReqId, ReqMeta], None]) -> None:  # noqa: ANN401
    """Start the receives whose handshakes have ended; shake hands again where it must.

    For a worker that pulls, up to 0.30.0; from 0.31.0 on upstream shakes hands again in either
    case. A handshake is known to have ended before its agents are entered: for that its thread
    needs a lock that the main thread may hold. One that gets here in between waits for the next
    step, so a step takes no more than there were. And an engine may be evicted before its blocks
    are read.
    """
    for _ in range(worker._ready_requests.qsize()):
        req_id, meta = worker._ready_requests.get_nowait()
        engine_id = meta.remote.engine_id
        if engine_id in worker._remote_agents:
            start(req_id, meta)
        elif engine_id in worker._handshake_futures:
            worker._ready_requests.put((req_id, meta))
        else:
            worker._background_nixl_handshake(req_id, engine_id, meta)


def transfer_done(worker: NixlBaseConnectorWorker, req_id: ReqId, handle: TransferHandle) -> None:
    """Record a transfer that completed, and give its handle back.

    Its KV is there, whatever happens to telemetry or handle.
    """
    receives: Any = getattr(worker, "_receives", None)  # of a worker that pulls, up to 0.29.0
    if receives is not None:
        receives.read_done(req_id, handle)
        return
    measure(worker, req_id, handle)
    release(worker, req_id, handle)


def tell(worker: NixlBaseConnectorWorker, agent: str, word: bytes, req_id: ReqId) -> bool:
    """Notify a rank of the peer; one that cannot be notified keeps its blocks until its timeout.

    Returns:
        Whether NIXL has taken it.
    """
    try:
        worker.nixl_wrapper.send_notif(agent, notif_msg=word)
    except Exception as error:
        worker._log_failure("notification_failed", req_id, error=error, remote_agent_name=agent)
        worker.xfer_stats.record_failed_notification()
        return False
    return True


def release(worker: NixlBaseConnectorWorker, req_id: ReqId, handle: TransferHandle) -> None:
    """Give the handle of a transfer that has ended, or shall, back to NIXL."""
    try:
        worker.nixl_wrapper.release_xfer_handle(handle)
    except Exception as error:
        worker._log_failure(failure_type="handle_release_failed", req_id=req_id, error=error)
        worker.xfer_stats.record_failed_transfer()


def release_all(
    worker: NixlBaseConnectorWorker, transfers: dict[ReqId, list[TransferHandle]]
) -> None:
    """Give back what is left of some transfers, when the worker shuts down."""
    for req_id, handles in transfers.items():
        while handles:
            release(worker, req_id, handles.pop())

# SPDX-License-Identifier: Apache-2.0
"""Up to 0.20.2: what hooks in the NIXL connector's worker call, on either side."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import RemoteMeta
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.worker import NixlConnectorWorker


def notify_skipped_ranks(
    worker: NixlConnectorWorker, req_id: str, remote: RemoteMeta, read_rank: int
) -> None:
    """Tell P's ranks that hold copies of the KV that they need not keep theirs.

    A latent (MLA) cache is the same on every rank of P. When P has more ranks than D, a D rank
    reads from the first of the P ranks assigned to it and the others would wait for a reader
    that never comes. P's scheduler frees the blocks once all its ranks have been told, so these
    may hear it while the read is still under way.

    P knows the request by its own id, `remote.request_id`; D's id means nothing to it. A
    notification that cannot be sent costs that rank's blocks until P's timeout, and nothing
    else: the other ranks are still told and the worker goes on.

    Args:
        worker: the D worker that reads.
        req_id: D's id of the request, for the log.
        remote: the P side of the request.
        read_rank: the P rank that is read from; it hears of completion from the read itself.
    """
    # The number lets a P rank know how many D ranks will report to it.
    message = f"{remote.request_id}:{worker.world_size}".encode()
    # Not by index: that would make the engine look connected.
    for rank, agent in worker._remote_agents.get(remote.engine_id, {}).items():
        if rank == read_rank:
            continue
        try:
            worker.nixl_wrapper.send_notif(agent, notif_msg=message)
        except Exception as error:  # whatever NIXL raises, the other ranks must hear
            worker._log_failure(
                failure_type="notification_failed",
                msg="A prefill rank that was not read from keeps the request's blocks until "
                "its timeout.",
                req_id=req_id,
                error=error,
                remote_rank=rank,
                remote_agent_name=agent,
            )
            worker.xfer_stats.record_failed_notification()

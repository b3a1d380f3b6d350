# SPDX-License-Identifier: Apache-2.0
"""0.24.0 to 0.29.0: the receives of `receive`, in a worker that pulls and not in one that pushes.

Both share a part that polls reads, drains `_failed_recv_reqs` and reports what is in there as
failed. It stays as it is; a worker that pulls has its `Receives` decide what gets there, and when.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker

from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl import inbox
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import take_ready

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
        ReqId,
        TransferHandle,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.tp_mapping import ReadSpec

    from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.receive import (
        GuardedReceives,
        Receives,
        ToldReceives,
    )

_Worker = Any
"""`NixlPullConnectorWorker`, as hooks have made it."""

_ReadBlocks = Callable[..., None]


def _receives_of(worker: _Worker) -> Receives:
    """What the hook in the class makes; which class it is differs from fix to fix."""
    receives: Receives = worker._receives
    return receives


# ---------------------------------------------------------------- 40364


class TakesReceives(NixlBaseConnectorWorker):
    """A base for `NixlPullConnectorWorker`, which names its `_receives`."""

    def _pop_done_transfers(self, transfers: dict[str, list[TransferHandle]]) -> set[ReqId]:
        receives = _receives_of(self)
        ended = receives.pop_ended(super()._pop_done_transfers)
        for req_id in receives.pop_failed(ended):
            self._failed_recv_reqs.put(req_id)
        return ended

    def _handle_failed_transfer(self, req_id: ReqId, handle: TransferHandle | None) -> None:
        _receives_of(self).fail(req_id, handle)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return blocks that are invalid since the last call, also those of failed handshakes."""
        _receives_of(self).invalidate_unconnected()
        return super().get_block_ids_with_load_errors()


def start_ready(worker: _Worker) -> None:
    """Start the receives whose handshakes have ended."""
    take_ready(worker, worker._receives.start)


# ---------------------------------------------------------------- K09


class GuardsReceives(NixlBaseConnectorWorker):
    """A base for `NixlPullConnectorWorker`: a handle that NIXL keeps does not stop a shutdown."""

    def shutdown(self) -> None:
        """Shut down, whatever becomes of the reads that are left."""
        receives: GuardedReceives | None = vars(self).get("_receives")
        if receives is not None:
            receives.release_all()
            self._recving_transfers.clear()
        super().shutdown()


def notifications(worker: NixlBaseConnectorWorker) -> Iterable[list[bytes]]:
    """Return what peers have sent since the last call, without what cannot be read.

    Up to 0.28.0 a number of ranks that ours cannot be divided into is among that.
    """
    if hasattr(worker, "expected_consumer_notifications_by_req"):
        return inbox.notifications(worker)
    topology = worker.transfer_topo
    assert topology is not None  # noqa: S101 - for mypy: set with the KV caches
    return inbox.notifications(worker, fit=topology.tp_ratio)


# ---------------------------------------------------------------- K08


def notes_reads(read: _ReadBlocks) -> _ReadBlocks:
    """Have `_read_blocks` note which rank of P is read, or was told that it need not wait."""

    @functools.wraps(read)
    def wrapper(
        self: _Worker,
        read_spec: ReadSpec,
        dst_engine_id: str,
        request_id: str,
        *args: Any,  # noqa: ANN401 - passed on as they are
        **named: Any,  # noqa: ANN401
    ) -> None:
        rank: Any = read_spec.remote_rank
        if rank not in self._remote_agents[dst_engine_id]:
            rank = (0, rank)  # from 0.26.0 on ranks go by pipeline stage, too
        receives: ToldReceives = self._receives
        before = len(self._recving_transfers.get(request_id, ()))
        read(self, read_spec, dst_engine_id, request_id, *args, **named)
        posted = self._recving_transfers.get(request_id, [])[before:]
        for handle in posted:
            receives.read_posted(handle, rank)
        if not posted and request_id in self._recving_transfers:  # else nobody awaits it
            receives.told(request_id, rank)

    return wrapper

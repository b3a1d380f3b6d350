# SPDX-License-Identifier: Apache-2.0
"""From 0.30.0 on: what can go wrong in a pull; the worker itself waits for the last read.

From 0.30.0 on a worker keeps the receives that failed (`_recv_failures`) and reports each once none
of its reads is left in `_recving_transfers`; up to 0.29.0 that is ours to do, see
`vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.receive`. What is left here is to bring
every failure to it, and to tell P.

A handle of a failed read that NIXL will not release is upstream's to keep, from 0.30.0 on: the read
counts as in flight, and its request is not reported, until NIXL has released it.

Everything runs on the worker's main thread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker

from vllm_overlay.distributed.kv_transfer.fix_counts import Acted, count
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import (
    release_all,
    take_ready,
)
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import (
    tell as tell,  # a hook takes it from here
)
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.failure_policy import (
    computes_what_is_lost,
)
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.inbox import (
    notifications as notifications,  # a hook takes it from here
)

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
        RemoteMeta,
        ReqId,
        ReqMeta,
        TransferHandle,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import (
        NixlPullConnectorWorker,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.tp_mapping import ReadSpec

_Rank = tuple[int, int]
"""Pipeline and tensor rank of P."""

_ReadBlocks = Callable[..., bool]
_ReadForRequest = Callable[["NixlPullConnectorWorker", str, "ReqMeta"], None]


def _fail(worker: NixlPullConnectorWorker, req_id: ReqId, error: Exception) -> None:
    """Fail a receive over what P said about itself or this request."""
    worker._log_failure(
        failure_type="transfer_setup_failed",
        req_id=req_id,
        msg="Marking blocks as invalid",
        error=error,
    )
    worker._handle_failed_transfer(req_id, None, worker._recv_failures)


def _agents_of(worker: NixlBaseConnectorWorker, engine_id: str) -> dict[_Rank, str] | None:
    """Return the agents of P by its ranks; None where it has not shaken hands.

    Not by index, which would make it look as if it had. Workers of vLLM's own tests know no peer.
    """
    known: dict[str, dict[_Rank, str]] = vars(worker).get("_remote_agents", {})
    return known.get(engine_id)


# ---------------------------------------------------------------- 40364


def fails_its_request(read: _ReadBlocks) -> _ReadBlocks:
    """Have `_read_blocks` fail its request, not the engine, where P's blocks make no sense here."""

    @functools.wraps(read)
    def wrapper(
        self: NixlPullConnectorWorker,
        read_spec: ReadSpec,
        dst_engine_id: str,
        request_id: str,
        *args: Any,  # noqa: ANN401 - passed on as they are
        **named: Any,  # noqa: ANN401
    ) -> bool:
        try:
            return read(self, read_spec, dst_engine_id, request_id, *args, **named)
        except Exception as error:
            _fail(self, request_id, error)
            return False

    return wrapper


def read_ready(worker: NixlPullConnectorWorker) -> None:
    """Post the reads of requests whose handshakes have ended. For 0.30.0."""
    take_ready(worker, worker._read_blocks_for_req)


# ---------------------------------------------------------------- K01


def fails_between_reads(read: _ReadForRequest) -> _ReadForRequest:
    """Have `_read_blocks_for_req` fail its request wherever it ends, also between two reads.

    Those that were posted are left to end before the request is reported. Without a connection
    there are no reads, and what fails is the handshake.
    """

    @functools.wraps(read)
    def wrapper(self: NixlPullConnectorWorker, req_id: str, meta: ReqMeta) -> None:
        assert meta.remote is not None  # noqa: S101 - for mypy: a receive has a remote
        if _agents_of(self, meta.remote.engine_id) is None:
            read(self, req_id, meta)
            return
        try:
            read(self, req_id, meta)
        except Exception as error:
            _fail(self, req_id, error)

    return wrapper


# ---------------------------------------------------------------- K09


class GuardsNixl(NixlBaseConnectorWorker):
    """A base for `NixlPullConnectorWorker`: a handle that NIXL keeps does not stop a shutdown."""

    def shutdown(self) -> None:
        """Shut down, whatever becomes of the reads that are left."""
        release_all(self, self.__dict__.get("_recving_transfers", {}))
        super().shutdown()


# ---------------------------------------------------------------- K08


class _Reads(NamedTuple):
    """The reads of one receive.

    Attributes:
        remote: P's side of it.
        readers: how many of our ranks P's ranks wait for.
        told: ranks of P that know that they need not wait: told by us, or by NIXL together with
            the data once their read ends well.
        rank: which of them a read is from.
        unread: those whose read has ended badly.
    """

    remote: RemoteMeta
    readers: int
    told: set[_Rank]
    rank: dict[TransferHandle, _Rank]
    unread: set[_Rank]


class TellsUnreadRanks(NixlBaseConnectorWorker):
    """A base for `NixlPullConnectorWorker`: after a failed receive, P's ranks that wait are told.

    Where D computes what it could not read (`failure_policy`); else nobody is told, as on stock.

    Each once, and only those that nobody has told: P counts its readers, and one word too many
    would free blocks that another rank of ours still reads.
    """

    @functools.cached_property
    def _reads(self) -> dict[ReqId, _Reads]:
        """Of the receives that are awaited and whose P is connected."""
        return {}

    def _handle_failed_transfer(
        self,
        req_id: str,
        handle: TransferHandle | None,
        failed_req_ids: set[str] | None = None,
        *counted: bool,  # whether to count it: from 0.31.0 on
        **named: bool,
    ) -> bool:
        reads = self._reads.get(req_id)
        if reads is not None and handle in reads.rank:
            # A rank that is read in two parts (mixed memory) is told when both have arrived.
            reads.unread.add(reads.rank[handle])
        return super()._handle_failed_transfer(req_id, handle, failed_req_ids, *counted, **named)

    def get_transfer_results(self) -> KVConnectorTransferResults:
        """Report what has ended; tell P of what has failed."""
        results = super().get_transfer_results()
        for req_id in results.finished_recving:
            reads = self._reads.pop(req_id, None)
            if req_id not in results.failed_recving:
                continue
            count(Acted.RECEIVE_FAILED)
            if reads is not None and computes_what_is_lost(self):
                self._tell(req_id, reads)
        return results

    def _tell(self, req_id: ReqId, reads: _Reads) -> None:
        # From 0.32.0 on: NIXL knows such a peer no more, so nothing can be sent before it shakes
        # hands again. Earlier ones go on with what they have, and a notification may fail.
        if reads.remote.engine_id in vars(self).get("_invalid_remote_engines", ()):
            return
        # A client may have made up an id that is no text; P does not know it anyhow.
        word = f"{reads.remote.request_id}:{reads.readers}".encode(errors="replace")
        agents = _agents_of(self, reads.remote.engine_id) or {}
        unread = [agent for rank, agent in agents.items() if rank not in reads.told - reads.unread]
        told = [tell(self, agent, word, req_id) for agent in unread]
        if any(told):
            count(Acted.UNREAD_TOLD)


def notes_who_is_told(read: _ReadBlocks) -> _ReadBlocks:
    """Have `_read_blocks` note which rank of P hears of it, and when."""

    @functools.wraps(read)
    def wrapper(
        self: NixlPullConnectorWorker,
        read_spec: ReadSpec,
        dst_engine_id: str,
        request_id: str,
        *args: Any,  # noqa: ANN401 - passed on as they are
        **named: Any,  # noqa: ANN401
    ) -> bool:
        reads = self._reads.get(request_id)
        if reads is None:  # nobody awaits it
            return read(self, read_spec, dst_engine_id, request_id, *args, **named)
        before = len(self._recving_transfers.get(request_id, ()))
        deferred = len(self._pending_recv_notifs.get(request_id, ()))
        if not read(self, read_spec, dst_engine_id, request_id, *args, **named):
            return False
        rank = (0, read_spec.remote_rank)
        posted = self._recving_transfers.get(request_id, [])[before:]
        reads.rank.update(dict.fromkeys(posted, rank))
        if len(self._pending_recv_notifs.get(request_id, ())) == deferred:
            reads.told.add(rank)
        return True

    return wrapper


def tells_the_others(read: _ReadForRequest) -> _ReadForRequest:
    """Have `_read_blocks_for_req` keep what has to be known of its reads, should one fail."""

    @functools.wraps(read)
    def wrapper(self: NixlPullConnectorWorker, req_id: str, meta: ReqMeta) -> None:
        assert meta.remote is not None  # noqa: S101 - for mypy: a receive has a remote
        agents = _agents_of(self, meta.remote.engine_id)
        awaited = vars(self).get("_recving_metadata", ())  # not in workers of vLLM's own tests
        if agents is None or req_id not in awaited:
            read(self, req_id, meta)
            return
        plan = self.tp_mappings[meta.remote.engine_id]
        reads = _Reads(meta.remote, plan.local_consumers, set(), {}, set())
        self._reads[req_id] = reads
        read(self, req_id, meta)
        if self.use_mla and len(plan.all_source_ranks) == 1 and req_id not in self._recv_failures:
            # Ranks with the same latent cache as the one that is read have been told meanwhile.
            reads.told.update(agents)

    return wrapper

# SPDX-License-Identifier: Apache-2.0
"""Up to 0.29.0: how the receive of a request's KV fails on D, and how nothing else does.

The life of one receive, which the scheduler asks for in `start_load_kv` and awaits in
`get_finished`::

    handshake ──► reading ──► received ──► reported
        │            │
        └──────►  failing  ──► failed ──► reported

=========  =============================  =================================================
state      where it is kept               what may happen
=========  =============================  =================================================
handshake  `_recving_metadata`            it fails, on the handshake thread
reading    also in `_recving_transfers`   a read is posted, completes, or fails
failing    also in `Receives._failed`     reads in flight end; none is posted any more
failed     not in `_recving_transfers`    nothing: the next `get_finished` reports it
reported   nowhere                        the id may be used again
=========  =============================  =================================================

A read is in flight from being posted until NIXL says DONE, or takes its handle back. That it says
ERR, or raises when asked, is not the end: a read has many parts, and the status of the whole is an
error as soon as one of them failed. Releasing the handle cancels the others; where NIXL refuses to
release it (`NIXL_ERR_REPOST_ACTIVE`), they may still write.

Who is told what: the scheduler hears of each awaited receive once, after its last read, and
which blocks are invalid no later than that; a P rank hears of each read that completed from NIXL
itself, and of each that will never complete from us. Failures are counted and logged, and none
of them leaves `start_load_kv` or `get_finished`.

Each class below is one fix and stands on the one before it; the hook in the worker's class names
the last. What a plugin's worker itself puts into `_failed_recv_reqs` is reported as on stock.
Everything runs on the worker's main thread but `handshake_failed`, which only
puts into a queue.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterable, Set
from itertools import chain
from typing import TYPE_CHECKING, Any, NoReturn

from vllm.logger import init_logger

from vllm_overlay.distributed.kv_transfer.fix_counts import Acted, count
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl import inbox
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.failure_policy import (
    computes_what_is_lost,
)
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.renewal import (
    is_of_the_peer,
    read_failed,
)
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.telemetry import measure
from vllm_overlay.logging_utils.bounded_log import BoundedLog

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
        ReqId,
        ReqMeta,
        TransferHandle,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.worker import NixlConnectorWorker

logger = init_logger(f"vllm.{__name__}")
failures = BoundedLog(logger)

_Transfers = dict[str, list[Any]]
"""The reads in flight, by receive: `_recving_transfers`."""

_Rank = Any
"""P's tensor rank; from 0.24.0 on after its pipeline rank."""

REMINDER_SECONDS = 60.0
"""Between two log lines about the same handle that NIXL does not release."""


class _OnDemand:
    """An attribute that is made where it is missing; two threads get the same."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self._make = make

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, owner: Any, kind: type) -> Any:  # noqa: ANN401 - as it is made
        return self if owner is None else vars(owner).setdefault(self._name, self._make(owner))


class FailedReceive:
    """A receive that failed and is not reported yet.

    Attributes:
        meta: what the scheduler asked for.
        polled: the failure came from polling a read, so polling also sees the end of the rest.
            Only 40364 on its own goes by it; from K01 on, what is in flight decides.
        unread: ranks of P whose read did not complete, and will not.
    """

    __slots__ = ("meta", "polled", "unread")

    def __init__(self, meta: ReqMeta, polled: bool) -> None:
        self.meta = meta
        self.polled = polled
        self.unread: set[_Rank] = set()


class Receives:
    """40364: every failure of a receive reaches the scheduler, and the worker goes on.

    `fail` is the one place for all of them (`NixlConnectorWorker._handle_failed_transfer`): the
    blocks become invalid, `kv_load_failure_policy` decides in the scheduler what that means, and
    a failed receive is never synced or post-processed.
    """

    @classmethod
    def on_demand(cls) -> Any:  # noqa: ANN401 - a worker's class has it for an instance of this one
        """Return what makes a worker's receives when they are first asked for.

        The constructor may be a plugin's: vllm-gaudi's heterogeneous layouts replace it.
        """
        return _OnDemand(cls)

    def __init__(self, worker: NixlConnectorWorker) -> None:
        self._worker = worker
        self._failed: dict[ReqId, FailedReceive] = {}
        # All that crosses from the handshake thread.
        self._failed_handshakes: queue.Queue[tuple[ReqId, ReqMeta]] = queue.Queue()

    # From start_load_kv.

    def start(self, req_id: ReqId, meta: ReqMeta) -> None:
        """Post the reads of a receive whose peer is connected.

        Nearly every receive begins here, so this is one call for all there is to do.
        """
        if meta.local_block_ids:
            self._worker._recving_metadata[req_id] = meta
        try:
            self._worker._read_blocks_for_req(req_id, meta)
        except Exception as error:
            self._not_posted(req_id, meta, error)

    def start_ready(self) -> None:
        """Start the receives whose handshake has succeeded since the last step.

        A handshake is known to have ended before its agents are entered: for that its thread
        needs the lock that the main thread holds while it asks for further receives. One that
        gets here in between waits for the next step.
        """
        ready = self._worker._ready_requests
        for _ in range(ready.qsize()):  # one consumer: what is counted can be taken
            req_id, meta = ready.get_nowait()
            assert meta.remote is not None  # noqa: S101 - for mypy: a receive has a remote
            if meta.remote.engine_id in self._worker._remote_agents:
                self.start(req_id, meta)
            else:
                ready.put((req_id, meta))

    def _not_posted(self, req_id: ReqId, meta: ReqMeta, error: Exception) -> None:
        """Fail a receive whose reads are not all posted."""
        # Not NIXL's refusal of a read, which `_read_blocks` handles, but what P said about
        # itself or this request making no sense here.
        self._worker._log_failure(
            failure_type="transfer_setup_failed",
            req_id=req_id,
            msg="Marking blocks as invalid",
            error=error,
            meta=meta,
        )
        self._fail_unpolled(req_id, meta)

    # From the handshake thread.

    def handshake_failed(self, req_id: ReqId, meta: ReqMeta, error: Exception) -> None:
        """Hand a failed handshake over to the main thread."""
        self._failed_handshakes.put((req_id, meta))
        self._worker._log_failure(
            failure_type="handshake_failed", req_id=req_id, error=error, meta=meta
        )

    # Failing.

    def fail(self, req_id: ReqId, handle: TransferHandle | None) -> None:
        """Record that a receive fails; `handle` is the read that failed, if one was made."""
        self._worker.xfer_stats.record_failed_transfer()
        # Reads are taken off this list after they have been polled.
        polled = handle is not None and handle in self._reads_in_flight(req_id)
        meta = self._worker._recving_metadata.get(req_id)
        if meta is not None:
            self._failed.setdefault(req_id, FailedReceive(meta, polled)).polled &= polled
            self._invalidate(self._blocks(meta))
        if handle is not None:
            self._give_up(req_id, handle)

    def invalidate_unconnected(self) -> None:
        """Fail the receives whose handshake has failed since the last call."""
        # One consumer: what is not empty now can be taken.
        while not self._failed_handshakes.empty():
            self._fail_unpolled(*self._failed_handshakes.get_nowait())

    def _fail_unpolled(
        self, req_id: ReqId, meta: ReqMeta, handle: TransferHandle | None = None
    ) -> None:
        """Fail a receive over something else than a read in flight."""
        # Upstream annotates the handle as never None, as long as only reads can fail.
        self._worker._handle_failed_transfer(req_id, handle)  # type: ignore[arg-type, unused-ignore]

    def _invalidate(self, blocks: Iterable[int]) -> None:
        """Keep invalid blocks for the scheduler: a set up to 0.21.0, since then a queue of sets."""
        kept: set[int] | queue.Queue[set[int]] = self._worker._invalid_block_ids
        if isinstance(kept, queue.Queue):
            kept.put(set(blocks))
        else:
            kept.update(blocks)

    def _blocks(self, meta: ReqMeta) -> Iterable[int]:
        """The logical blocks that become invalid with a receive."""
        groups = () if self._worker._is_hma_required else meta.local_block_ids[:1]
        return chain.from_iterable(groups)

    def _give_up(self, req_id: ReqId, handle: TransferHandle) -> None:
        """Give back the handle of a read that failed."""
        self.release(handle)

    def release(self, handle: TransferHandle) -> bool:
        """Give the handle of a read that has ended, or shall, back to NIXL.

        Returns:
            True; from K09 on also False, where NIXL does not take it.
        """
        self._worker.nixl_wrapper.release_xfer_handle(handle)
        return True

    def _reads_in_flight(self, req_id: ReqId) -> Iterable[TransferHandle]:
        return self._worker._recving_transfers.get(req_id, ())

    # From get_finished.

    def pop_ended(self, poll: Callable[[_Transfers], set[ReqId]] | None = None) -> set[ReqId]:
        """Take the receives that are to be reported now, received or failed.

        `poll` takes those of which no read is in flight any more; the worker's own by default.
        """
        # Runs in every engine step, and mostly there is nothing to do.
        transfers = self._worker._recving_transfers
        poll = poll or self._worker._pop_done_transfers
        ended = poll(transfers) if transfers else set()
        if self._failed_handshakes.queue:  # as empty() would say, without its lock
            self.invalidate_unconnected()
        if self._failed:
            ended.update(r for r, failed in self._failed.items() if self._is_over(r, failed))
        return ended

    def has_failed(self, req_id: ReqId) -> bool:
        """Whether a receive that has ended failed; asked once for each, when it is reported."""
        failed = self._failed.pop(req_id, None)
        if failed is None:
            return False
        self._report(req_id, failed)
        return True

    def pop_failed(self, ended: Iterable[ReqId]) -> set[ReqId]:
        """Return those of the receives just ended that failed; asked once, as `has_failed`.

        Since 0.22.0 the worker itself passes over the receives of such a set.
        """
        return {req_id for req_id in ended if self.has_failed(req_id)} if self._failed else set()

    def _is_over(self, req_id: ReqId, failed: FailedReceive) -> bool:
        """Whether a receive that polling has not found to be through is to be reported now."""
        return not failed.polled

    def _report(self, req_id: ReqId, failed: FailedReceive) -> None:
        count(Acted.RECEIVE_FAILED)
        failures.warning(
            "Reporting request %s as failed to receive: kv_load_failure_policy applies", req_id
        )


class _ReadRefusedError(Exception):
    """NIXL refused a read; `handle` is its handle, if it got as far as to have one."""

    def __init__(self, handle: TransferHandle | None) -> None:
        self.handle = handle


class ReceivesWithReads(Receives):
    """K01: a failed receive is reported once, and only after its last read in flight has ended.

    Until then NIXL may write into its blocks, and the scheduler must not hand them on.
    """

    def read_refused(self, handle: TransferHandle | None) -> NoReturn:
        """Give up posting reads of this receive, because NIXL refused one of them.

        Raises:
            _ReadRefusedError: Always. It ends the posting of reads, in `start`, so that no read
                has to ask first whether it is still worth it.
        """
        raise _ReadRefusedError(handle)

    def _not_posted(self, req_id: ReqId, meta: ReqMeta, error: Exception) -> None:
        if not isinstance(error, _ReadRefusedError):
            super()._not_posted(req_id, meta, error)
            return
        try:  # it is logged already
            self._fail_unpolled(req_id, meta, error.handle)
        except Exception as release_error:  # up to K09
            super()._not_posted(req_id, meta, release_error)

    def _is_over(self, req_id: ReqId, failed: FailedReceive) -> bool:
        return req_id not in self._worker._recving_transfers


class ReceivesOfGroups(ReceivesWithReads):
    """K02: a failed receive invalidates the blocks of every KV-cache group."""

    def _blocks(self, meta: ReqMeta) -> Iterable[int]:
        return chain.from_iterable(meta.local_block_ids)


class AwaitedReceives(ReceivesOfGroups):
    """K03: a receive without blocks, which only tells P to free its own, is never reported.

    The scheduler asks for it with no group at all: it awaits nothing, and may have forgotten the
    request by now. A receive that is awaited has a list for each group.
    """

    def wait_for_handshake(self, req_id: ReqId, meta: ReqMeta) -> None:
        """Remember a receive that cannot `start` yet, if it is going to be reported."""
        if meta.local_block_ids:
            self._worker._recving_metadata[req_id] = meta

    def _fail_unpolled(
        self, req_id: ReqId, meta: ReqMeta, handle: TransferHandle | None = None
    ) -> None:
        if meta.local_block_ids:
            super()._fail_unpolled(req_id, meta, handle)
        else:
            self._worker.xfer_stats.record_failed_notification()


class GuardedReceives(AwaitedReceives):
    """K09: what NIXL refuses besides a read costs a log line and a count.

    The KV of a read that is DONE is there, whatever happens to its handle or telemetry: a handle
    that cannot be released is left to NIXL, which keeps such handles until its agent ends. A read
    that failed may still write until its handle is released: its request is kept, not reported,
    and the handle tried again in each step.
    """

    def __init__(self, worker: NixlConnectorWorker) -> None:
        super().__init__(worker)
        # Of reads that failed.
        self._unreleased: dict[ReqId, list[TransferHandle]] = {}
        self._next_reminder = 0.0

    def read_done(self, req_id: ReqId, handle: TransferHandle) -> None:
        """Record a read that completed, and give its handle back."""
        measure(self._worker, req_id, handle)
        self.release(handle)

    def release(self, handle: TransferHandle) -> bool:
        """Give the handle of a read that has ended, or shall, back to NIXL.

        Returns:
            Whether NIXL has taken it.
        """
        try:
            return super().release(handle)
        except Exception as error:
            self._log("handle_release_failed", error)
            self._worker.xfer_stats.record_failed_transfer()
            return False

    def _give_up(self, req_id: ReqId, handle: TransferHandle) -> None:
        if not self.release(handle):
            self._unreleased.setdefault(req_id, []).append(handle)
            self._next_reminder = time.monotonic() + REMINDER_SECONDS

    def pop_ended(self, poll: Callable[[_Transfers], set[ReqId]] | None = None) -> set[ReqId]:
        """Take the receives that are to be reported now, received or failed."""
        if self._unreleased:
            self._release_again()
        ended = super().pop_ended(poll)
        return ended - self._unreleased.keys() if self._unreleased else ended

    def _release_again(self) -> None:
        """Try the handles that NIXL did not take; it was logged and counted once."""
        for req_id, handles in list(self._unreleased.items()):
            self._unreleased[req_id] = [handle for handle in handles if not self._released(handle)]
            if not self._unreleased[req_id]:
                del self._unreleased[req_id]
        if self._unreleased and time.monotonic() >= self._next_reminder:
            self._next_reminder = time.monotonic() + REMINDER_SECONDS
            logger.warning(
                "NIXL still does not release failed reads of these requests, which keep their "
                "blocks until it does: %s",
                ", ".join(self._unreleased),
            )

    def _released(self, handle: TransferHandle) -> bool:
        try:
            return super().release(handle)
        except Exception:
            return False

    def release_all(self) -> None:
        """Try every handle that is left once more, when the worker shuts down.

        What NIXL does not take then ends with its agent.
        """
        for handles in self._worker._recving_transfers.values(), self._unreleased.values():
            for handle in chain.from_iterable(handles):
                self.release(handle)
        self._unreleased.clear()

    def tell(self, agent: str, notification: bytes, req_id: ReqId) -> bool:
        """Notify an agent of P; where that fails its blocks wait for P's timeout.

        Returns:
            Whether NIXL has taken it.
        """
        try:
            self._worker.nixl_wrapper.send_notif(agent, notif_msg=notification)
        except Exception as error:
            self._log("notification_failed", error, req_id, remote_agent_name=agent)
            self._worker.xfer_stats.record_failed_notification()
            return False
        return True

    def notifications(self) -> Iterable[list[bytes]]:
        """Return what peers have sent since the last call, without what cannot be read."""
        return inbox.notifications(self._worker, fit=self._tp_ratio)

    def _tp_ratio(self, ranks: int) -> int:
        topology = self._worker.transfer_topo
        assert topology is not None  # noqa: S101 - for mypy: set with the KV caches
        return topology.tp_ratio(ranks)

    def _log(
        self,
        what: str,
        error: Exception,
        req_id: ReqId | None = None,
        **context: Any,  # noqa: ANN401 - whatever helps the operator
    ) -> None:
        self._worker._log_failure(failure_type=what, req_id=req_id, error=error, **context)


class ToldReceives(GuardedReceives):
    """K08: P's ranks that nobody will read from any more are told so, once, and free the blocks.

    Where D computes what it could not read (`failure_policy`); else nobody is told, as on stock.
    A rank whose read completed heard of it from NIXL, together with the data. Being told twice
    would be worse than not at all: P counts its readers, and would free blocks that another rank
    of ours still reads.
    """

    def __init__(self, worker: NixlConnectorWorker) -> None:
        super().__init__(worker)
        self._rank_read: dict[TransferHandle, _Rank] = {}  # of the reads in flight
        self._told: dict[ReqId, set[_Rank]] = {}  # before the last read of the receive

    def read_posted(self, handle: TransferHandle, rank: _Rank) -> None:
        """Remember which rank of P a read is from."""
        self._rank_read[handle] = rank

    def told(self, req_id: ReqId, rank: _Rank) -> None:
        """Remember a rank of P that has nothing for us and was told so, while others are read."""
        self._told.setdefault(req_id, set()).add(rank)

    def pop_ended(self, poll: Callable[[_Transfers], set[ReqId]] | None = None) -> set[ReqId]:
        """Take the receives that are to be reported now, received or failed."""
        ended = super().pop_ended(poll)
        if self._told:
            for req_id in ended:
                self._told.pop(req_id, None)
        return ended

    def read_done(self, req_id: ReqId, handle: TransferHandle) -> None:
        """Record a read that completed, and give its handle back."""
        self._rank_read.pop(handle, None)
        super().read_done(req_id, handle)

    def fail(self, req_id: ReqId, handle: TransferHandle | None) -> None:
        """Record that a receive fails; `handle` is the read that failed, if one was made."""
        super().fail(req_id, handle)
        if handle in self._rank_read:
            self._leave_unread(req_id, {self._rank_read.pop(handle)})

    def _fail_unpolled(
        self, req_id: ReqId, meta: ReqMeta, handle: TransferHandle | None = None
    ) -> None:
        super()._fail_unpolled(req_id, meta, handle)
        if meta.local_block_ids:
            # Every rank that this worker shook hands with, but those whose read was posted.
            reading = {self._rank_read.get(handle) for handle in self._reads_in_flight(req_id)}
            reading |= self._told.get(req_id, set())
            self._leave_unread(req_id, self._agents(meta).keys() - reading)

    def _leave_unread(self, req_id: ReqId, ranks: Set[_Rank]) -> None:
        if req_id in self._failed:
            self._failed[req_id].unread |= ranks

    def _report(self, req_id: ReqId, failed: FailedReceive) -> None:
        super()._report(req_id, failed)
        if not computes_what_is_lost(self._worker):
            return
        assert failed.meta.remote is not None  # noqa: S101 - for mypy: a receive has a remote
        text = f"{failed.meta.remote.request_id}:{self._readers(failed.meta.remote.engine_id)}"
        # A client may have made up an id that is no text; P does not know it anyhow.
        notification = text.encode(errors="replace")
        unread = [a for rank, a in self._agents(failed.meta).items() if rank in failed.unread]
        told = [self.tell(agent, notification, req_id) for agent in unread]
        if any(told):
            count(Acted.UNREAD_TOLD)

    def _readers(self, engine_id: str) -> int:
        """How many of our ranks P's ranks wait for; 0.29.0 works it out for each peer."""
        plan = vars(self._worker).get("tp_mappings", {}).get(engine_id)
        readers: int = getattr(plan, "local_consumers", self._worker.world_size)
        return readers

    def _agents(self, meta: ReqMeta) -> dict[_Rank, str]:
        """P's agents by rank; none while there was no handshake."""
        assert meta.remote is not None  # noqa: S101 - for mypy: a receive has a remote
        # Not by index: that would make the engine look connected.
        return self._worker._remote_agents.get(meta.remote.engine_id, {})


class RenewedReceives(ToldReceives):
    """55471: after NIXL could not read from an engine, the next receive shakes hands with it anew.

    What fails before NIXL is asked, and a handshake, say nothing about the connection.
    """

    def fail(self, req_id: ReqId, handle: TransferHandle | None) -> None:
        """Record that a receive fails; `handle` is the read that failed, if one was made."""
        meta = self._worker._recving_metadata.get(req_id)
        super().fail(req_id, handle)
        if handle is not None:
            read_failed(self._worker, meta)

    def _not_posted(self, req_id: ReqId, meta: ReqMeta, error: Exception) -> None:
        super()._not_posted(req_id, meta, error)
        if isinstance(error, _ReadRefusedError) and is_of_the_peer(error.__context__):
            read_failed(self._worker, meta)

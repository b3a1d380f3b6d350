# SPDX-License-Identifier: Apache-2.0
"""Up to 0.31.0: D shakes hands anew with an engine that a read has failed from.

A P that is restarted under its engine id has another NIXL agent and other addresses, and after a
network flap NIXL may have dropped what it knew of the old one. What D holds of the engine (agents,
descriptor lists, tables) is then good for nothing, and stock keeps it until D ends. Here it goes::

    connected ──► failed ──► reached ──► drained ──► forgotten ──► connected

=========  ========================================  ==============================================
state      begins                                    receives from this engine
=========  ========================================  ==============================================
connected  with a handshake                          are read
failed     when NIXL refuses a read, or one fails    those under way end as ever; new ones wait
reached    when P's side channel accepts a           the same
           connection, which another thread tries
drained    when all of them have been reported       wait for handshakes with others, which load
                                                     NIXL metadata on a thread of their own
forgotten  when nothing is loading either            begin with a handshake, as the first one did
=========  ========================================  ==============================================

A P that is not reached stays connected: what is read from it fails at once, as on stock, where a
handshake would take 5 s of the only thread for them. It is tried again with each read that fails,
and for that no receive waits any more.

Nothing that NIXL may still use is released: a receive is reported after its last read has ended and
NIXL has its handles back. New ones wait so that this comes about under load, too, when another rank
of the engine goes on answering; for `PATIENCE` at most. What comes later is read as on stock, until
the engine is drained all the same.

A read that failed says nothing about how many handshakes will be of use: there is one for each
receive that finds the engine forgotten, as on stock for one that was never connected. Nothing is
tried again by itself. Each rank of D decides for itself, by its own reads.

Everything else runs on the worker's main thread.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Set
from concurrent.futures import Future, ThreadPoolExecutor
from socket import create_connection
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.logger import init_logger

from vllm_overlay.distributed.kv_transfer.fix_counts import Acted, count
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.handshake import disconnect
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.params import printable, unbracketed
from vllm_overlay.logging_utils.bounded_log import BoundedLog

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
        NixlConnectorMetadata,
        ReqId,
        ReqMeta,
    )

log = BoundedLog(init_logger(f"vllm.{__name__}"))

PATIENCE = 5.0
"""Seconds that new receives wait for those under way. As long as vLLM waits for one rank to answer
a handshake, and well within the leases of P, 30 s and more."""

REACHED = 1.0
"""Seconds in which an address of P has to accept a connection."""

AT_ONCE = 16
"""Engines that are tried at a time; of more, one is tried when the next read from it fails."""

_Worker = Any
"""`NixlConnectorWorker`; from 0.24.0 on `NixlPullConnectorWorker`."""

_Start = Callable[[_Worker, "NixlConnectorMetadata"], None]


class _Failed(NamedTuple):
    """An engine that a read has failed from.

    Attributes:
        until: When receives wait no longer, on `time.monotonic`.
        address: Where it is tried whether P is there.
        reached: What comes of that.
    """

    until: float
    address: str
    reached: Future[None]


class _Renewals:
    """The engines that a worker is to shake hands with anew, and the receives that wait for it."""

    def __init__(self, worker: _Worker) -> None:
        self._worker = worker
        self._failed: dict[str, _Failed] = {}
        self._away: set[str] = set()  # those that were not reached, the last time
        self._waiting: dict[ReqId, ReqMeta] = {}
        self._executor = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="kvfix-nixl-renewal")

    def add(self, engine_id: str, host: str, port: int) -> None:
        # A peer may call itself as we do: then the tables are those of our own memory, too.
        connected = engine_id in self._worker._remote_agents and engine_id != self._worker.engine_id
        if not connected or engine_id in self._failed:
            return
        if sum(not one.reached.done() for one in self._failed.values()) >= AT_ONCE:
            return
        try:
            reached = self._executor.submit(_reach, host, port)
        except RuntimeError:  # there is no thread to be had
            return
        until, address = time.monotonic() + PATIENCE, printable(f"{host}:{port}")
        self._failed[engine_id] = _Failed(until, address, reached)

    def advance(self, metadata: NixlConnectorMetadata) -> None:
        """Forget the engines that can be forgotten; let receives of the others wait."""
        if not self._failed and not self._waiting:
            return
        self._forget(self._reached())
        now = time.monotonic()
        kept = {
            engine_id
            for engine_id, failed in self._failed.items()
            if now < failed.until and engine_id not in self._away
        }
        come, waited = metadata.reqs_to_recv, self._waiting
        waiting = {key: meta for key, meta in waited.items() if _waits(meta, kept)}
        # One that only notifies may have the id of one that waits, and they cannot go on together.
        waiting |= {
            key: meta
            for key, meta in come.items()
            if _waits(meta, kept) or (key in waited and key not in waiting)
        }
        metadata.reqs_to_recv = {
            key: meta
            for metas in (waited, come)
            for key, meta in metas.items()
            if waiting.get(key) is not meta
        }
        self._waiting = waiting

    def _reached(self) -> set[str]:
        """Return the engines that were reached; what was not is connected as before."""
        reached = set()
        for engine_id, failed in [*self._failed.items()]:
            if not failed.reached.done():
                continue
            error = failed.reached.exception()
            if error is None:
                reached.add(engine_id)
                self._away.discard(engine_id)
                continue
            del self._failed[engine_id]
            if engine_id not in self._away:
                self._away.add(engine_id)
                log.warning(
                    "A read from engine %s has failed, and nobody listens at %s: %s",
                    engine_id,
                    failed.address,
                    error,
                )
        return reached

    def _forget(self, reached: set[str]) -> None:
        worker = self._worker
        with worker._handshake_lock:
            for engine_id in self._failed.keys() - worker._remote_agents.keys():
                del self._failed[engine_id]  # evicted by vLLM
            self._away &= worker._remote_agents.keys()
        for engine_id in unused(worker, reached & self._failed.keys()):
            del self._failed[engine_id]
            disconnect(worker, engine_id)
            count(Acted.PEER_MET_ANEW)
            log.warning(
                "A read from engine %s has failed. The next one begins with a handshake.", engine_id
            )


def unused(worker: _Worker, engine_ids: Set[str]) -> Set[str]:
    """Return those of some engines that can be forgotten: NIXL has nothing under way with them, and
    is loading agents of none."""
    with worker._handshake_lock:
        if worker._handshake_futures:
            return set()
        # A receive that waits for its first read cannot wait for a handshake everywhere.
        ready = [meta for _, meta in list(worker._ready_requests.queue)]
    if worker._recving_transfers.keys() - worker._recving_metadata.keys():
        return set()  # whose reads these are is not known
    return engine_ids - engines_of(worker._recving_metadata.values()) - engines_of(ready)


def engines_of(receives: Iterable[ReqMeta]) -> set[str]:
    """Return the engines that are read from."""
    return {meta.remote.engine_id for meta in receives if meta.remote is not None}


def _waits(meta: ReqMeta, kept: Set[str]) -> bool:
    """Whether a receive waits for engines that are kept. One that only notifies has nobody who
    would see to it later."""
    reads = any(len(group) > 0 for group in meta.local_block_ids)
    return reads and meta.remote is not None and meta.remote.engine_id in kept


def is_of_the_peer(error: BaseException | None) -> bool:
    """Whether what NIXL raised can be about the peer. About numbers of blocks that the peer does
    not have it raises first, and a client may have made them up."""
    return type(error).__name__ != "nixlInvalidParamError"


def read_failed(worker: _Worker, meta: ReqMeta | None) -> None:
    """Have a worker shake hands anew with an engine, because NIXL could not read from it."""
    if meta is None or meta.remote is None:
        return
    if "_renewals" not in vars(worker):  # a test may make a worker without its constructor
        worker._renewals = _Renewals(worker)
    worker._renewals.add(meta.remote.engine_id, meta.remote.host, meta.remote.port)


def _reach(host: str, port: int) -> None:
    """Try whether somebody listens where P's side channel is.

    Raises:
        OSError: Nobody does, or not in time.
    """
    create_connection((unbracketed(host), port), REACHED).close()


def shakes_hands_anew(start: _Start) -> _Start:
    """Have `start_load_kv` forget engines that a read has failed from, before it goes on."""

    @functools.wraps(start)
    def wrapper(self: _Worker, metadata: NixlConnectorMetadata) -> None:
        renewals: _Renewals | None = self.__dict__.get("_renewals")
        if renewals is not None:
            renewals.advance(metadata)
        start(self, metadata)

    return wrapper


def list_of_size(worker: _Worker, block_size: int) -> int:
    """Up to 0.26.0: return the handle of our own memory's descriptors, cut to P's block size.

    In each handshake with a P of smaller kernel blocks vLLM makes them once more, and puts their
    handle in the place of one that nobody gives back: reads may be under way with it.
    """
    handle: int | None = worker.src_xfer_handles_by_block_size.get(block_size)
    if handle is None:
        handle, _ = worker.register_local_xfer_handler(block_size)
    return handle

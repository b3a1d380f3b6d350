# SPDX-License-Identifier: Apache-2.0
"""All releases: what telling a prefill server costs that D does not know yet.

A receive without blocks reads nothing: it only tells P that it may free its own. Where D meets this
P for the first time it has to shake hands first, and vLLM has one thread for all handshakes, which
waits 5 s for each rank that does not answer. Every client can send requests that name such hosts
and leave; the reads of all others would wait in line behind them. So the handshake for a
notification is made in two parts::

    waiting ──► asked ──► heard ──► registered ──► told
       │          │         │           │
       └──────────┴─────────┴───────────┴──► dropped: a count and a line in the log;
                                             P's own timeout frees

=============  =========================  =====================================================
state          thread                     what happens
=============  =========================  =====================================================
waiting        main                       nothing; at most `MAX_PEERS` peers, each once
asked          one of our own             the network part of vLLM's `_nixl_handshake`; what it
                                          would give to NIXL is noted, not done
heard          main                       vLLM's way to shake hands begins: it may part with peers
                                          that have been idle
registered     vLLM's handshake thread    NIXL gets what was noted, as in any handshake of vLLM's
told           main                       vLLM goes on as after any handshake
=============  =========================  =====================================================

What waits is changed under vLLM's `_handshake_lock`, and on the main thread. NIXL is entered by the
threads that vLLM lets enter it, and the registration is in `_handshake_futures` like every
handshake, so a read that comes for the same peer shares it and nothing is registered twice. A read
never waits for the network part: it makes its own, and whichever is first serves both. Nor does it
use what was heard before it came: P may be another by then.

A worker of somebody else's with a handshake of its own has all this as on stock.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar, cast

from vllm.logger import init_logger
from vllm.platforms import current_platform

from vllm_overlay.distributed.kv_transfer.fix_counts import Acted, count
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.handshake_line import line_of
from vllm_overlay.logging_utils.bounded_log import BoundedLog

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
        ReqId,
        ReqMeta,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.worker import NixlConnectorWorker

logger = init_logger(f"vllm.{__name__}")

MAX_PEERS = 64
"""Peers that may wait to be told. Not requests: a server that restarts may be named by hundreds.
Asked for 5 s each, as many silent ones keep a good one from being told for less than `USEFUL`."""

PATIENCE = 10.0
"""Seconds in which a peer has to name all its ranks; vLLM gives it 5 s for each."""

USEFUL = 480.0
"""Seconds after which P has freed the blocks itself: its default `VLLM_NIXL_ABORT_REQUEST_TIMEOUT`.
Leases, from 0.22.0 on, are shorter."""

_Method = TypeVar("_Method", bound=Callable[..., Any])

_Waiting = tuple["ReqId", "ReqMeta"]

_PARTS = ("_nixl_handshake", "add_remote_agent")
"""The methods of a worker that have to know which part of a handshake is made."""


def _nothing() -> None:
    pass


class _Heard:
    """What the network part of a handshake found out.

    Attributes:
        deadline: when (`time.monotonic`) it has to be over; then, when registered.
        agents: what NIXL has to be given: the arguments of `add_remote_agent`, in order.
        result: the handshake's, with places in `agents` for the names that NIXL would have given.
    """

    def __init__(self) -> None:
        self.deadline = time.monotonic() + PATIENCE
        self.agents: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.result: Any = None

    def note(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Note an agent instead of registering it, and return what stands for its name."""
        if time.monotonic() > self.deadline:
            raise TimeoutError(f"not all ranks have answered within {PATIENCE:.0f} s")
        self.agents.append((args, kwargs))
        return str(len(self.agents) - 1)

    def register(self, worker: NixlConnectorWorker) -> Any:  # noqa: ANN401 - the handshake's result
        """Give NIXL what was noted; return what the whole handshake would have."""
        if not worker.use_host_buffer:
            # UCX has to find this thread's CUDA context, or it does without CUDA IPC.
            current_platform.set_device(worker.device_id)
        names = [worker.add_remote_agent(*args, **kwargs) for args, kwargs in self.agents]
        # From 0.26.0 on it is a tuple, with the difference between the clocks.
        agents, *others = self.result if isinstance(self.result, tuple) else (self.result,)
        named = {rank: names[int(place)] for rank, place in agents.items()}
        return (named, *others) if others else named


class _Peer:
    """A peer that is to be told, and the receives that say what."""

    def __init__(self, first: ReqMeta) -> None:
        self.first = first
        self.since = time.monotonic()
        self.receives: list[_Waiting] = []


class Notifications:
    """The notifications of a worker that wait for a peer."""

    def __init__(self, worker: NixlConnectorWorker, shake_hands: Callable[..., None]) -> None:
        self._worker = worker
        self._shake_hands = shake_hands  # vLLM's way: the worker, a receive's id, engine and meta
        self._peers: dict[tuple[str, str], _Peer] = {}
        self._asked: tuple[tuple[str, str], _Peer, Future[_Heard]] | None = None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="kvfix-nixl-notifier")
        self._here = threading.local()
        self._heard: dict[str, _Heard] = {}
        self._settled: Future[None] | None = None  # done once every handshake before it is
        self._log = BoundedLog(logger)

    # Main thread.

    def add(self, req_id: ReqId, engine_id: str, meta: ReqMeta) -> None:
        """Take a receive that only notifies, of a peer that is not connected."""
        assert meta.remote is not None  # noqa: S101 - for mypy: a receive has a remote
        # A client may have said several addresses for an engine, and anything for an address.
        key = (engine_id, repr((meta.remote.host, meta.remote.port, meta.tp_size, _sizes(meta))))
        with self._worker._handshake_lock:
            if engine_id in self._worker._handshake_futures:
                self._share(engine_id, [(req_id, meta)])
                return
            if key not in self._peers and len(self._peers) >= MAX_PEERS:
                self._drop([(req_id, meta)], f"{MAX_PEERS} others wait")
                return
            self._peers.setdefault(key, _Peer(meta)).receives.append((req_id, meta))
            self._ask_next()

    def advance(self) -> None:
        """Have receives go on whose peer is connected by now, and drop others; never wait."""
        if not self._peers and self._asked is None:
            return
        now = time.monotonic()
        with self._worker._handshake_lock:
            for key, peer in list(self._peers.items()):
                if key[0] in self._worker._remote_agents:
                    self._go_on(self._peers.pop(key).receives)
                elif now - peer.since > USEFUL:
                    self._drop(self._peers.pop(key).receives, "it has not been reached")
            if self._asked is not None and self._asked[2].done():
                key, peer, asked = self._asked
                self._asked = None
                # What was heard for others who have gone on since, or long ago, may not hold now.
                if self._peers.get(key) is peer and not _is_late(asked, now):
                    del self._peers[key]
                    self._take(key[0], asked, peer.receives)
            self._ask_next()

    def pending(self) -> int:
        """How many steps notifications have before them, two each; changes as one goes on."""
        with self._worker._handshake_lock:
            waiting = 2 * sum(len(peer.receives) for peer in self._peers.values())
            if self._settled is not None:
                # The thread queues before it settles, so this order of looking misses nothing.
                if self._settled.done() and self._worker._ready_requests.empty():
                    self._settled = None
                else:
                    waiting += 1
            return waiting

    def _ask_next(self) -> None:
        # One at a time: an engine that ends waits for no more than that.
        if self._asked is None and self._peers:
            key, peer = next(iter(self._peers.items()))
            try:
                self._asked = key, peer, self._executor.submit(self._ask, key, peer.first)
            except RuntimeError:  # the system has no room for a thread; vLLM's own may be there
                self._share(key[0], self._peers.pop(key).receives)

    def _go_on(self, receives: Sequence[_Waiting]) -> None:
        for receive in receives:
            self._worker._ready_requests.put(receive)

    def _drop(self, receives: Sequence[_Waiting], reason: str) -> None:
        for _, meta in receives:
            self._worker.xfer_stats.record_failed_notification()
            count(Acted.NOTIFICATION_GIVEN_UP)
            remote = meta.remote
            self._log.warning(
                "A request that will not read its blocks could not be reported to a prefill "
                "server, which keeps the blocks until its own timeout: engine %.100r at "
                "%.100r:%.20r: %.300s",
                remote and remote.engine_id,
                remote and remote.host,
                remote and remote.port,
                reason,
            )

    def _take(self, engine_id: str, asked: Future[_Heard], receives: Sequence[_Waiting]) -> None:
        try:
            self._register(engine_id, asked.result(), receives)
        except Exception as error:  # a notification is worth no engine
            self._heard.pop(engine_id, None)
            self._drop(receives, repr(error))

    def _register(self, engine_id: str, heard: _Heard, receives: Sequence[_Waiting]) -> None:
        if engine_id not in self._worker._handshake_futures:
            self._heard[engine_id] = heard  # for the handshake that begins now
        self._share(engine_id, receives)

    def _share(self, engine_id: str, receives: Sequence[_Waiting]) -> None:
        """Have receives go on after vLLM's handshake with an engine, which may have begun."""
        for req_id, meta in receives:
            self._shake_hands(self._worker, req_id, engine_id, meta)
        # One thread shakes all hands, and runs the callbacks that queue what may go on.
        self._settled = self._worker._handshake_initiation_executor.submit(_nothing)

    # The notifier's thread.

    def _ask(self, key: tuple[str, str], meta: ReqMeta) -> _Heard:
        assert meta.remote is not None  # noqa: S101 - for mypy: a receive has a remote
        heard = self._here.heard = _Heard()
        try:
            heard.result = self._worker._nixl_handshake(
                meta.remote.host, meta.remote.port, meta.tp_size, key[0], *_sizes(meta)
            )
        finally:
            self._here.heard = None
        heard.deadline = time.monotonic() + PATIENCE
        return heard

    # Any thread.

    def here(self) -> _Heard | None:
        """Where to note what NIXL would be given, in the notifier's thread; else None."""
        return getattr(self._here, "heard", None)

    def take_heard(self, engine_id: str) -> _Heard | None:
        """Take what the network part found out, for the handshake that it is meant for."""
        heard = None if self.here() else self._heard.pop(engine_id, None)
        return heard if heard and time.monotonic() <= heard.deadline else None

    def forget_heard(self, engine_id: str) -> None:
        """Have a handshake that has not begun be made as a whole: a read is to share it."""
        self._heard.pop(engine_id, None)


def _is_late(asked: Future[_Heard], now: float) -> bool:
    return asked.exception() is None and now > asked.result().deadline


def _sizes(meta: ReqMeta) -> tuple[int, ...]:
    """A peer's sizes of other parallelism than tensor, as `_nixl_handshake` wants them."""
    return tuple(getattr(meta, name) for name in ("dcp_size", "pp_size") if hasattr(meta, name))


def _of(worker: NixlConnectorWorker) -> Notifications | None:
    found: Notifications | None = vars(worker).get("_notifications")
    return found


def _ours(method: Callable[..., Any]) -> Any:  # noqa: ANN401 - the same
    vars(method)["knows_parts"] = True  # decorators around it copy that
    return method


def _shakes_hands_as_vllm(worker: NixlConnectorWorker) -> bool:
    """Whether a worker has the parts of a handshake that are used here; a plugin may have its own.

    Some of vLLM's own tests make one without its constructor, and so without a table of handshakes.
    """
    ours = (getattr(getattr(type(worker), name, None), "knows_parts", None) for name in _PARTS)
    return "_handshake_futures" in vars(worker) and all(known is True for known in ours)


# ---------------------------------------------------------------- hooks


def notifies_aside(shake_hands: _Method) -> _Method:
    """Have `_background_nixl_handshake` keep receives that only notify out of the way of reads."""

    @functools.wraps(shake_hands)
    def wrapper(
        self: NixlConnectorWorker, req_id: str, remote_engine_id: str, meta: ReqMeta
    ) -> None:
        notifications = _of(self)
        reads = meta.local_block_ids or getattr(meta, "awaiting_kvs", False)
        if reads and notifications is not None:
            notifications.forget_heard(remote_engine_id)
        if reads or not _shakes_hands_as_vllm(self):
            shake_hands(self, req_id, remote_engine_id, meta)
            return
        if notifications is None:  # made on demand, on the main thread: most never notify so
            notifications = Notifications(self, shake_hands)
            vars(self)["_notifications"] = notifications
        notifications.add(req_id, remote_engine_id, meta)

    return cast("_Method", wrapper)


def finds_network_part_done(shake_hands: _Method) -> _Method:
    """Have `_nixl_handshake` begin with what was heard aside, if this handshake is for that."""

    @functools.wraps(shake_hands)
    def wrapper(
        self: NixlConnectorWorker,
        host: str,
        port: int,
        remote_tp_size: int,
        expected_engine_id: str,
        *sizes: Any,  # noqa: ANN401 - of other kinds of parallelism
        **named: Any,  # noqa: ANN401 - the same, and whatever the release hands on
    ) -> object:
        notifications = _of(self)
        heard = notifications and notifications.take_heard(expected_engine_id)
        make = functools.partial(
            shake_hands, self, host, port, remote_tp_size, expected_engine_id, *sizes, **named
        )
        if notifications and notifications.here():
            return make()
        return line_of(self).make(functools.partial(heard.register, self) if heard else make)

    return _ours(wrapper)


def notes_aside(register: _Method) -> _Method:
    """Have `add_remote_agent` leave NIXL alone in the notifier's thread."""

    @functools.wraps(register)
    def wrapper(self: NixlConnectorWorker, *args: Any, **kwargs: Any) -> str:  # noqa: ANN401
        notifications = _of(self)
        heard = notifications and notifications.here()
        if heard:
            return heard.note(args, kwargs)
        line_of(self).rank_answered()
        name: str = register(self, *args, **kwargs)
        return name

    return _ours(wrapper)


def advance_notifications(worker: NixlConnectorWorker) -> None:
    """Have the notifications go on whose peer has answered; called once in each step."""
    notifications = _of(worker)
    if notifications is not None:
        notifications.advance()


def pending_notifications(worker: NixlConnectorWorker) -> int:
    """What notifications have before them, 0 if none waits; asked at the end of each step."""
    notifications = _of(worker)
    return 0 if notifications is None else notifications.pending()

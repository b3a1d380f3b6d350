# SPDX-License-Identifier: Apache-2.0
"""All releases: how D asks P about a lease, and how P answers, on the handshake's side channel.

A question is a handshake message for P's first rank with something in the frame before it, which is
empty otherwise and which nobody looks at. So a P without this patch, where one was restarted in the
place of one that has it, answers a question with its metadata, and that is no answer.

D's scheduler asks and goes on. ZeroMQ's own threads talk to P, and what P said is there for a later
step. A connection can die without a word while nothing is said (a firewall forgets it, P's machine
is lost), so ZeroMQ looks once a second whether P is still there, and connects anew if not. What was
on the way is lost then: `read_check` has it asked again. A connection that nobody needs goes soon:
ZeroMQ would try for ever to have it again, at an address that may be somebody else's by then.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from importlib import import_module
from ipaddress import ip_address
from socket import AF_INET, SOCK_STREAM, getaddrinfo
from typing import Any, NamedTuple, TypeVar, cast

import msgspec
import zmq
from vllm.logger import init_logger
from vllm.utils.network_utils import make_zmq_path

from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.handshake_messages import PAUSE
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.lease_book import (
    Answer,
    LeaseBook,
    Standing,
)
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.params import unbracketed
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.read_check import PATIENCE

logger = init_logger(f"vllm.{__name__}")

MAX_PEERS = 128
"""Peers to which a connection is kept open; the one that was asked longest ago is closed, and what
it was asked is asked again if need be."""

MAX_REPLIES = 1000
"""Of one peer, that are taken at once; ZeroMQ holds as many, and then lets the peer wait."""

MAX_NAMES = 2**10
"""Hosts of which the address is kept, and questions that wait for one."""

MAX_LOOKUPS = 16
"""Names that are looked up at once, each by a thread. A name server that does not answer takes some
10 s of one."""

FRESH = 2.0
"""Seconds for which an address is taken for the host's own; then it is looked up again. Another P
may have it by then, and that one says of every lease that it is gone."""

SLOW = 0.05
"""Seconds after which a lookup is not waited for where an older address is known: what is asked
there is late by so much at the most."""

IDLE = 10.0
"""Seconds after which a connection over which nothing was asked is closed, in the next step with
reads."""

_ALIVE = {
    zmq.HEARTBEAT_IVL: 1.0,
    zmq.HEARTBEAT_TIMEOUT: 2.0,
    zmq.CONNECT_TIMEOUT: 2.0,
    zmq.RECONNECT_IVL: 0.5,
    zmq.RECONNECT_IVL_MAX: 2.0,
}
"""Seconds between looks whether a peer is there, until it is given up, to connect to it, and
between tries to. A P that was lost is asked again within `PATIENCE`."""

MARK = b"kvfix lease 1"
"""With what a question and an answer begin, in the frame that is empty in a handshake."""

_Said = TypeVar("_Said")


@functools.cache
def _handshake() -> bytes:
    """Return what a handshake of this release asks P's first rank with.

    From 0.26.0 on it names the pipeline stage as well. A stock P's listener ends at anything else.
    Looked up when it is needed: who imports the scheduler first is in the middle of this package.
    """
    try:
        metadata = import_module("vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata")
    except ModuleNotFoundError:  # up to 0.19.1
        stages = False
    else:
        stages = "pp_size" in metadata.ReqMeta.__dataclass_fields__
    return msgspec.msgpack.encode((b"get_meta_msg", *((0, 0) if stages else (0,))))


class Question(NamedTuple):
    """What D asks.

    Attributes:
        token: The lease.
        reader: Who asks; the same when it asks again.
        agents: The NIXL agents of D's workers, as far as its scheduler knows them.
        asked: When, in seconds on a clock of D's; P only repeats it.
    """

    token: str
    reader: str
    agents: frozenset[str]
    asked: float


class Reply(NamedTuple):
    """What P says, and to which question."""

    reader: str
    asked: float
    answer: Answer


class Peer(NamedTuple):
    """Where a P listens."""

    host: str
    port: int


# ---------------------------------------------------------------- P

_books: weakref.WeakSet[LeaseBook] = weakref.WeakSet()
"""Those of the engines in this process: one, but in tests."""

_opening = threading.Lock()
"""Held while a book is added, or all are listed: that is another thread's."""


def open_book() -> LeaseBook:
    """Make a book about which this process answers questions."""
    book = LeaseBook()
    with _opening:
        _books.add(book)
    return book


@contextlib.contextmanager
def answers_questions(
    opening: AbstractContextManager[zmq.Socket[bytes]],
) -> Iterator[zmq.Socket[bytes]]:
    """Have the handshake listener's socket answer questions, and hand on everything else."""
    with opening as socket:
        yield cast("zmq.Socket[bytes]", _Listening(socket))


class _Listening:
    """A socket whose `recv_multipart` returns what is no question.

    Questions are nothing to the listener: while they come it has its pauses all the same.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket

    def recv_multipart(self) -> list[bytes]:
        until = now() + PAUSE
        while True:
            frames = self._socket.recv_multipart()
            if len(frames) != 3 or not frames[1].startswith(MARK):
                return frames
            reply = answer(frames[1])
            if reply is not None:
                self._socket.send_multipart((frames[0], reply))
            if now() > until:
                raise zmq.Again

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever a socket has
        return getattr(self._socket, name)


def answer(frame: bytes) -> bytes | None:
    """Return what to answer to the frame that holds a question; None if that cannot be read."""
    asked = _read(frame, Question)
    if asked is None:
        return None
    with _opening:
        books = tuple(_books)
    answers = [book.answer(asked.token, asked.reader, asked.agents) for book in books]
    known = [one for one in answers if one.standing is not Standing.GONE]
    said = known[0] if known else Answer(Standing.GONE, 0.0)
    return MARK + msgspec.msgpack.encode(Reply(asked.reader, asked.asked, said))


# ---------------------------------------------------------------- D


class _Connection:
    """A socket that is connected to a P, or is to be.

    Attributes:
        used: When something was last asked.
        awaited: Answers that have not come; some of them never will.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self.used = float("-inf")
        self.awaited = 0

    def ask(self, question: Question) -> None:
        self._socket.send_multipart(question_frames(question), zmq.NOBLOCK)
        self.used = now()
        self.awaited += 1

    def replies(self) -> Iterator[Reply]:
        with contextlib.suppress(zmq.Again):
            for _ in range(min(self.awaited, MAX_REPLIES)):
                reply = read_reply(self._socket.recv_multipart(zmq.NOBLOCK))
                self.awaited -= 1
                if reply is not None:
                    yield reply

    def close(self) -> None:
        self._socket.close()


class LeaseQuestions:
    """Asks about leases without waiting. Not for more than one thread."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        # That which was used last comes last.
        self._connections: OrderedDict[tuple[str, int], _Connection] = OrderedDict()
        self._names = _Names()
        self._nameless: deque[tuple[Peer, Question]] = deque(maxlen=MAX_NAMES)

    def ask(self, peer: Peer, question: Question) -> None:
        """Send a question, as soon as the peer's address is known; there may never be a reply."""
        address = self._names.find(peer.host, question.asked)
        if address is None:
            self._nameless.append((peer, question))
            return
        try:
            self._connected(address, peer.port).ask(question)
        except zmq.ZMQError as error:  # no such host, or it takes nothing more
            logger.debug("Cannot ask %s about a lease: %s", peer, error)

    def replies(self) -> Iterator[Reply]:
        """Yield the replies that have come since the last call."""
        for _ in range(len(self._nameless)):
            peer, question = self._nameless.popleft()
            # Asked of too late it is dropped, but not for D's own silence.
            known = self._names.find(peer.host, question.asked) is not None
            if known or now() - question.asked < PATIENCE:
                self.ask(peer, question)
        for connection in self._connections.values():
            if connection.awaited:
                yield from connection.replies()
        self._close_idle()

    def _connected(self, address: str, port: int) -> _Connection:
        peer = address, port
        if peer in self._connections:
            self._connections.move_to_end(peer)
            return self._connections[peer]
        socket = self._make_socket()
        try:
            socket.setsockopt(zmq.IPV6, int(":" in address))
            socket.connect(make_zmq_path("tcp", address, port))
        except zmq.ZMQError:
            socket.close()
            raise
        self._connections[peer] = connection = _Connection(socket)
        if len(self._connections) > MAX_PEERS:
            self._connections.popitem(last=False)[1].close()
        return connection

    def _close_idle(self) -> None:
        while self._connections:
            oldest = next(iter(self._connections.values()))
            if now() - oldest.used <= IDLE:
                return
            self._connections.popitem(last=False)[1].close()

    def _make_socket(self) -> zmq.Socket[bytes]:
        if self._context is None:  # of its own: it ends with this object
            self._context = zmq.Context()
            weakref.finalize(self, _close, self._context, self._connections).atexit = False
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        for option, seconds in _ALIVE.items():
            socket.setsockopt(option, int(1000 * seconds))
        return socket


def _close(context: zmq.Context[Any], connections: Mapping[Any, _Connection]) -> None:
    """End ZeroMQ's threads, which they do not before all sockets are closed."""
    for connection in connections.values():
        connection.close()
    context.term()


class _Address(NamedTuple):
    """What a lookup said, None where it found nothing, and when."""

    address: str | None
    found: float


class _Names:
    """The addresses of hosts, looked up by threads of its own.

    ZeroMQ would look up a name in the thread that talks to all peers, and one that hangs would
    keep D from hearing of any.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[str, _Address] = OrderedDict()
        self._under_way: dict[str, float] = {}  # since when

    def find(self, host: str, since: float) -> str | None:
        """Return a host's address as it was at some time `since`, or shortly before.

        None while that is not known, for whoever asks again.
        """
        if is_address(bare := unbracketed(host)):
            return bare
        known = self._known.get(host)
        if known is None or known.found < min(since, now() - FRESH):
            if host not in self._under_way and len(self._under_way) < MAX_LOOKUPS:
                self._begin(host)
            if now() - self._under_way.get(host, float("-inf")) < SLOW:
                return None
            known = self._known.get(host)  # it may be over already
        return None if known is None else known.address

    def _begin(self, host: str) -> None:
        self._under_way[host] = now()
        try:
            threading.Thread(target=self._look_up, args=(host,), daemon=True).start()
        except RuntimeError as error:  # the system has no room for a thread
            logger.debug("Cannot look %s up to ask it about a lease: %s", host, error)
            del self._under_way[host]

    def _look_up(self, host: str) -> None:
        before = self._known.get(host)
        address = None if before is None else before.address
        try:  # the first IPv4 address: a handshake goes there
            address = str(getaddrinfo(host, None, AF_INET, SOCK_STREAM)[0][4][0])
        except (OSError, ValueError) as error:  # no such name, or none at all
            logger.debug("Cannot find %s to ask it about a lease: %s", host, error)
        finally:
            self._known[host] = _Address(address, now())
            if len(self._known) > MAX_NAMES:
                self._known.popitem(last=False)
            self._under_way.pop(host, None)


@functools.lru_cache(MAX_NAMES)
def is_address(host: str) -> bool:
    """Whether a host is given as an address."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def question_frames(question: Question) -> tuple[bytes, bytes]:
    """Return what is sent to a P: the question, and the handshake that it looks like."""
    return MARK + msgspec.msgpack.encode(question), _handshake()


def read_reply(frames: list[bytes]) -> Reply | None:
    """Return what a P said; None where that is no answer to a question."""
    if len(frames) != 1 or not frames[0].startswith(MARK):
        return None
    return _read(frames[0], Reply)


def _read(frame: bytes, kind: type[_Said]) -> _Said | None:
    """Return what is behind the mark; None if that is nothing of this kind."""
    try:
        return msgspec.msgpack.decode(frame[len(MARK) :], type=kind)
    except Exception:  # also of Unicode, and of depth: nothing that is sent may end a thread
        return None


def now() -> float:
    """Return the time on the clock by which D measures reads."""
    return time.monotonic()

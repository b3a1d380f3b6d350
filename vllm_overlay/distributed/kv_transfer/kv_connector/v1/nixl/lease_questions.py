# SPDX-License-Identifier: Apache-2.0
"""All releases: how D asks P about a lease, and how P answers, on the handshake's side channel.

A question is a handshake message for P's first rank with something in the frame before it, which is
empty otherwise and which nobody looks at. So a P without this patch, where one was restarted in the
place of one that has it, answers a question with its metadata, and that is no answer.

D's scheduler asks and goes on. A thread of its own talks to P, and what P said is there for a later
step.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, cast

import msgspec
import zmq
from vllm.logger import init_logger
from vllm.utils.network_utils import make_zmq_path

from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.lease_book import (
    Answer,
    LeaseBook,
    Standing,
)

logger = init_logger(f"vllm.{__name__}")

MAX_PEERS = 64
"""Peers to which a connection is kept open; the one that was asked longest ago is closed."""

_RING, _END = b"ring", b"end"
"""What the thread is told."""

MARK = b"kvfix lease 1"
"""With what a question and an answer begin, in the frame that is empty in a handshake."""


_GET_META = b"get_meta_msg"
"""What begins a handshake, in every release."""


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
    """Where a P listens, and whether a handshake names its pipeline stage (from 0.26.0 on)."""

    host: str
    port: int
    stages: bool


# ---------------------------------------------------------------- P

_books: weakref.WeakSet[LeaseBook] = weakref.WeakSet()
"""Those of the engines in this process: one, but in tests."""


def open_book() -> LeaseBook:
    """Make a book about which this process answers questions."""
    book = LeaseBook()
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
    """A socket whose `recv_multipart` returns what is no question."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket

    def recv_multipart(self) -> list[bytes]:
        while True:
            frames = self._socket.recv_multipart()
            if len(frames) != 3 or not frames[1].startswith(MARK):
                return frames
            reply = answer(frames[1])
            if reply is not None:
                self._socket.send_multipart((frames[0], reply))

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever a socket has
        return getattr(self._socket, name)


def answer(frame: bytes) -> bytes | None:
    """Return what to answer to the frame that holds a question; None if that cannot be read."""
    try:
        asked = msgspec.msgpack.decode(frame[len(MARK) :], type=Question)
    except msgspec.DecodeError:
        return None
    answers = [book.answer(asked.token, asked.reader, asked.agents) for book in tuple(_books)]
    known = [one for one in answers if one.standing is not Standing.GONE]
    said = known[0] if known else Answer(Standing.GONE, 0.0)
    return MARK + msgspec.msgpack.encode(Reply(asked.reader, asked.asked, said))


# ---------------------------------------------------------------- D


class LeaseQuestions:
    """Asks about leases without waiting. Not for more than one thread."""

    def __init__(self) -> None:
        self._questions: queue.SimpleQueue[tuple[Peer, Question]] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        self._bell: zmq.Socket[bytes] | None = None

    def ask(self, peer: Peer, question: Question) -> None:
        """Send a question; there may never be a reply."""
        self._questions.put((peer, question))
        if self._bell is None:
            self._start()
        assert self._bell is not None  # noqa: S101 - for mypy
        with contextlib.suppress(zmq.Again):  # it rings already
            self._bell.send(_RING, zmq.NOBLOCK)

    def replies(self) -> Iterator[Reply]:
        """Return the replies that have come since the last call."""
        for _ in range(self._replies.qsize()):  # one consumer: what is counted can be taken
            yield self._replies.get_nowait()

    def _start(self) -> None:
        context = zmq.Context()
        self._bell = context.socket(zmq.PAIR)
        inside = context.socket(zmq.PAIR)
        inside.bind("inproc://questions")
        self._bell.connect("inproc://questions")
        threading.Thread(
            target=_talk,
            args=(context, inside, self._questions, self._replies),
            name="kv_lease_questions",
            daemon=True,
        ).start()
        weakref.finalize(self, _stop, self._bell)


def _stop(bell: zmq.Socket[bytes]) -> None:
    """End the thread; only it may close its sockets."""
    with contextlib.suppress(zmq.ZMQError):
        bell.send(_END, zmq.NOBLOCK)
    bell.close()


def _talk(
    context: zmq.Context[Any],
    bell: zmq.Socket[bytes],
    questions: queue.SimpleQueue[tuple[Peer, Question]],
    replies: queue.SimpleQueue[Reply],
) -> None:
    sockets: OrderedDict[Peer, zmq.Socket[bytes]] = OrderedDict()
    poller = zmq.Poller()
    poller.register(bell, zmq.POLLIN)
    while True:
        for socket, _ in poller.poll():
            frames = socket.recv_multipart()
            if socket is bell and frames == [_END]:
                for one in (bell, *sockets.values()):
                    one.close(linger=0)
                context.term()
                return
            if (reply := read_reply(frames)) is not None:
                replies.put(reply)
        while not questions.empty():
            peer, question = questions.get_nowait()
            try:
                socket = _connected(context, poller, sockets, peer)
                socket.send_multipart(question_frames(peer, question), zmq.NOBLOCK)
            except zmq.ZMQError as error:  # no such host, or it takes nothing more
                logger.debug("Cannot ask %s about a lease: %s", peer, error)


def question_frames(peer: Peer, question: Question) -> tuple[bytes, bytes]:
    """Return what is sent to a P: the question, and the handshake that it looks like."""
    first_rank = (_GET_META, 0, 0) if peer.stages else (_GET_META, 0)
    return MARK + msgspec.msgpack.encode(question), msgspec.msgpack.encode(first_rank)


def _connected(
    context: zmq.Context[Any],
    poller: zmq.Poller,
    sockets: OrderedDict[Peer, zmq.Socket[bytes]],
    peer: Peer,
) -> zmq.Socket[bytes]:
    if peer in sockets:
        sockets.move_to_end(peer)
        return sockets[peer]
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, 1)
    try:
        socket.connect(make_zmq_path("tcp", peer.host, peer.port))
    except zmq.ZMQError:
        socket.close()
        raise
    poller.register(socket, zmq.POLLIN)
    sockets[peer] = socket
    if len(sockets) > MAX_PEERS:
        _, oldest = sockets.popitem(last=False)
        poller.unregister(oldest)
        oldest.close()
    return socket


def read_reply(frames: list[bytes]) -> Reply | None:
    """Return what a P said; None where that is no answer to a question."""
    if len(frames) != 1 or not frames[0].startswith(MARK):
        return None
    try:
        return msgspec.msgpack.decode(frames[0][len(MARK) :], type=Reply)
    except msgspec.DecodeError:
        return None


def now() -> float:
    """Return the time on the clock by which D measures reads."""
    return time.monotonic()

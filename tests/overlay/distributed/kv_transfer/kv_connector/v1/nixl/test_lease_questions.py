"""Questions about leases over a real side channel, and who survives them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from tests.support.harness import HarnessError
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl import lease_questions
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.lease_book import Answer, Standing
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.lease_questions import (
    MARK,
    LeaseQuestions,
    Peer,
    Question,
    Reply,
    answers_questions,
    open_book,
    question_frames,
    read_reply,
)

AGENTS = frozenset({"d/0"})


class Listening:
    """P's end of a side channel, as its listener sees it."""

    def __init__(self, raw: zmq.Socket[bytes]) -> None:
        self.raw = raw
        self.peer = Peer("127.0.0.1", raw.bind_to_random_port("tcp://127.0.0.1"), stages=True)

    def handed_on(self, seconds: float = 0.2) -> list[bytes] | None:
        """Listen for so long: what comes that is no question."""
        self.raw.setsockopt(zmq.RCVTIMEO, int(1000 * seconds))
        with answers_questions(contextlib.nullcontext(self.raw)) as socket:
            try:
                return socket.recv_multipart()
            except zmq.Again:
                return None


@pytest.fixture
def p() -> Iterator[Listening]:
    context = zmq.Context()
    yield Listening(context.socket(zmq.ROUTER))
    context.destroy(linger=0)


def replies(questions: LeaseQuestions, p: Listening, count: int = 1) -> list[Reply]:
    found: list[Reply] = []
    end = time.monotonic() + 5
    while len(found) < count and time.monotonic() < end:
        p.handed_on(0.02)
        found += questions.replies()
    if len(found) < count:
        raise HarnessError(f"{len(found)} replies", f"{count}, on the loopback interface")
    return found


def test_an_answer_comes_back_to_who_asked(p: Listening) -> None:
    book, questions = open_book(), LeaseQuestions()
    token = book.hold("at-p", time.perf_counter() + 100)
    questions.ask(p.peer, Question(token, "d", AGENTS, 1.5))
    questions.ask(p.peer, Question("of nobody", "e", AGENTS, 2.5))
    known, unknown = sorted(replies(questions, p, 2))
    assert known[:2] == ("d", 1.5)
    assert known.answer.standing is Standing.HELD
    assert 0 < known.answer.seconds <= 10
    assert unknown == ("e", 2.5, Answer(Standing.GONE, 0.0))


def test_a_handshake_is_handed_on(p: Listening) -> None:
    context = zmq.Context()
    with context.socket(zmq.REQ) as peer:
        peer.connect(f"tcp://127.0.0.1:{p.peer.port}")
        peer.send(b"handshake")
        frames = p.handed_on(5.0)
    context.destroy(linger=0)
    assert frames is not None
    assert frames[1:] == [b"", b"handshake"]


@pytest.mark.parametrize("stages", [True, False])
def test_a_stock_listener_takes_a_question_for_a_handshake(stages: bool) -> None:
    """It unpacks three frames, decodes the last, and looks up the rank; else its thread ends."""
    peer = Peer("127.0.0.1", 1, stages)
    _, asked = question_frames(peer, Question("token", "d", AGENTS, 1.0))
    assert msgspec.msgpack.decode(asked) == [b"get_meta_msg", *[0] * (1 + stages)]


@pytest.mark.parametrize(
    "frames",
    [
        pytest.param([b"", b"metadata of a stock P"], id="stock"),
        pytest.param([b"", b"metadata", b"clock"], id="stock, with its clock"),
        pytest.param([MARK + b"\xc1"], id="no msgpack"),
        pytest.param([MARK + msgspec.msgpack.encode(["d", "soon", ["held", 1]])], id="no time"),
        pytest.param([MARK + b"\x93\xa1\xff\x01\x92\xa4held\x01"], id="no Unicode"),
        pytest.param([MARK + b"\x94\xa1d\x01\x92\xa4held\x01" + 9999 * b"\x91"], id="too deep"),
        pytest.param([], id="nothing"),
    ],
)
def test_what_is_no_answer_is_none(frames: list[bytes]) -> None:
    assert read_reply(frames) is None


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(b"\xc1", id="no msgpack"),
        pytest.param(b"\x94\xa1\xff\xa1d\x90\x01", id="no Unicode"),
        pytest.param(b"\x95\xa1t\xa1d\x90\x01" + 9999 * b"\x91", id="too deep"),
    ],
)
def test_what_is_no_question_is_not_answered(p: Listening, said: bytes) -> None:
    context = zmq.Context()
    with context.socket(zmq.DEALER) as peer:
        peer.connect(f"tcp://127.0.0.1:{p.peer.port}")
        peer.send_multipart([MARK + said, b""])
        peer.send_multipart([b"", b"handshake"])
        frames = p.handed_on(5.0)
        answered = peer.poll(50)
    context.destroy(linger=0)
    assert frames is not None
    assert frames[-1] == b"handshake"
    assert not answered


def test_no_more_peers_are_kept_than_that(p: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_questions, "MAX_PEERS", 1)
    questions = LeaseQuestions()
    for port in (1, 2, 3):  # where nobody listens
        questions.ask(Peer("127.0.0.1", port, stages=True), Question("t", "d", AGENTS, 1.0))
    questions.ask(p.peer, Question("t", "last", AGENTS, 1.0))
    assert [reply.reader for reply in replies(questions, p)] == ["last"]


def test_a_host_that_cannot_be_reached_keeps_nobody_waiting(p: Listening) -> None:
    questions = LeaseQuestions()
    questions.ask(Peer("no such host", 70000, stages=True), Question("t", "d", AGENTS, 1.0))
    questions.ask(p.peer, Question("t", "next", AGENTS, 1.0))
    assert [reply.reader for reply in replies(questions, p)] == ["next"]


def test_no_more_replies_are_taken_at_once_than_that(
    p: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A P that goes on and on does not keep D from its next step."""
    monkeypatch.setattr(lease_questions, "MAX_REPLIES", 1)
    questions = LeaseQuestions()
    for reader in "abc":
        questions.ask(p.peer, Question("t", reader, AGENTS, 1.0))
    p.handed_on(0.5)
    assert [[reply.reader for reply in questions.replies()] for _ in "abcd"] == [
        ["a"],
        ["b"],
        ["c"],
        [],
    ]


def test_nothing_is_left_of_who_has_asked() -> None:
    def threads() -> int:
        return sum(1 for _ in Path("/proc/self/task").iterdir())  # those of ZeroMQ, too

    before = threads()
    questions = LeaseQuestions()
    questions.ask(Peer("127.0.0.1", 1, stages=True), Question("t", "d", AGENTS, 1.0))
    assert threads() > before
    del questions
    assert threads() == before

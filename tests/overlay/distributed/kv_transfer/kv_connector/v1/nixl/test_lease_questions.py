"""Questions about leases over a real side channel, and who survives them."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from tests.support.harness import HarnessError
from tests.support.release import since
from tests.support.side_channel import Fleet
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
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.read_check import PATIENCE

AGENTS = frozenset({"d/0"})
QUESTION = MARK + msgspec.msgpack.encode(Question("t", "d", AGENTS, 1.0))
REPLY = MARK + msgspec.msgpack.encode(Reply("d", 1.0, Answer(Standing.GONE, 0.0)))


class Listening:
    """P's end of a side channel, as its listener sees it."""

    def __init__(self, raw: zmq.Socket[bytes], host: str = "127.0.0.1", port: int = 0) -> None:
        self.raw = raw
        raw.bind(f"tcp://{host}:{port or '*'}")
        bound = raw.getsockopt_string(zmq.LAST_ENDPOINT)
        self.peer = Peer(host, int(bound.rpartition(":")[2]))

    def handed_on(self, seconds: float = 0.2) -> list[bytes] | None:
        """Listen for so long: what comes that is no question."""
        with answers_questions(contextlib.nullcontext(self.raw)) as socket:
            socket.setsockopt(zmq.RCVTIMEO, int(1000 * seconds))
            try:
                return socket.recv_multipart()
            except zmq.Again:
                return None


@pytest.fixture
def p() -> Iterator[Listening]:
    context = zmq.Context()
    yield Listening(context.socket(zmq.ROUTER))
    context.destroy(linger=0)


class Firewall:
    """Passes on what comes for `port`, and forgets its connections without a word."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._open: list[tuple[socket.socket, socket.socket, threading.Event]] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def forget(self) -> None:
        for _, _, forgotten in self._open:
            forgotten.set()

    def close(self) -> None:
        for one in (self._listener, *(end for pair in self._open for end in pair[:2])):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                ends = self._listener.accept()[0], socket.create_connection(("127.0.0.1", self._to))
                forgotten = threading.Event()
                self._open.append((*ends, forgotten))
                for one, other in (ends, ends[::-1]):
                    threading.Thread(
                        target=self._pass, args=(one, other, forgotten), daemon=True
                    ).start()

    def _pass(self, one: socket.socket, other: socket.socket, forgotten: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(2**16):
                if not forgotten.is_set():
                    other.sendall(data)


class Names:
    """A name server: `hangs` is what it never answers, `addresses` all that it knows."""

    def __init__(self, **addresses: str) -> None:
        self.addresses = addresses
        self.asked: list[str] = []
        self.end = threading.Event()

    def __call__(self, host: str, _: None, family: int, kind: int) -> list[tuple[Any, ...]]:
        assert (family, kind) == (socket.AF_INET, socket.SOCK_STREAM)
        self.asked.append(host)
        self.asked_by = threading.current_thread()
        host.encode("idna")  # as the real one does
        if host.startswith("hangs"):
            self.end.wait(30)
        if host not in self.addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(family, kind, 6, "", (self.addresses[host], 0))]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[Names]:
    server = Names(p="127.0.0.1")
    monkeypatch.setattr(lease_questions, "getaddrinfo", server)
    yield server
    server.end.set()


def replies(
    questions: LeaseQuestions, p: Listening, count: int = 1, seconds: float = 5
) -> list[Reply]:
    found: list[Reply] = []
    end = time.monotonic() + seconds
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


def test_whichever_book_knows_a_lease_says_how_it_stands() -> None:
    books = open_book(), open_book()
    for book in books:
        token = book.hold("read", time.perf_counter() + 100)
        book.hear({"read": AGENTS})
        book.free(["read"])
        frame, _ = question_frames(Question(token, "d", AGENTS, 1.0))
        said = read_reply([lease_questions.answer(frame) or b""])
        assert said == ("d", 1.0, Answer(Standing.READ, 0.0))


def test_a_p_is_heard_as_often_as_it_was_asked(p: Listening) -> None:
    questions = LeaseQuestions()
    for _ in range(2):
        questions.ask(p.peer, Question("t", "d", AGENTS, 1.0))
    sender, *_ = p.raw.recv_multipart()
    p.raw.send_multipart((sender, b"", b"metadata of a stock P"))
    for _ in range(3):
        p.raw.send_multipart((sender, REPLY))
    assert [reply.asked for reply in replies(questions, p)] == [1.0]
    time.sleep(0.1)
    assert not list(questions.replies())


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param([b"", b"handshake"], id="handshake"),
        pytest.param([QUESTION], id="shorter"),
        pytest.param([QUESTION, b"handshake", b"more"], id="longer"),
    ],
)
def test_what_is_no_question_is_handed_on(p: Listening, sent: list[bytes]) -> None:
    context = zmq.Context()
    with context.socket(zmq.DEALER) as peer:
        peer.connect(f"tcp://127.0.0.1:{p.peer.port}")
        peer.send_multipart(sent)
        frames = p.handed_on(5.0)
    context.destroy(linger=0)
    assert frames is not None
    assert frames[1:] == sent


def test_a_question_begins_as_a_handshake_of_this_release() -> None:
    ranks = [0, 0] if since("0.26.0") else [0]  # of tensor parallelism, and the pipeline's stage
    assert msgspec.msgpack.decode(lease_questions._handshake()) == [b"get_meta_msg", *ranks]


@pytest.mark.parametrize(("fields", "ranks"), [(None, 1), (["tp_size"], 1), (["pp_size"], 2)])
def test_a_question_names_a_stage_where_a_release_s_requests_do(
    fields: list[str] | None, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def metadata(_: str) -> SimpleNamespace:
        if fields is None:
            raise ModuleNotFoundError  # up to 0.19.1
        return SimpleNamespace(ReqMeta=SimpleNamespace(__dataclass_fields__=fields))

    monkeypatch.setattr(lease_questions, "import_module", metadata)
    said = msgspec.msgpack.decode(lease_questions._handshake.__wrapped__())
    assert said == [b"get_meta_msg", *[0] * ranks]


def test_a_stock_listener_takes_a_question_for_a_handshake() -> None:
    """It unpacks what comes as it unpacks a handshake of this release; else its thread ends."""
    with Fleet() as fleet:
        place = fleet.serve("P")
        fleet.read()
        assert fleet.until(fleet.reads)
    _, looks_like = question_frames(Question("token", "d", AGENTS, 1.0))
    assert [looks_like] == place.messages


@pytest.mark.parametrize(
    "frames",
    [
        pytest.param([b"", b"metadata of a stock P"], id="stock"),
        pytest.param([b"", b"metadata", b"clock"], id="stock, with its clock"),
        pytest.param([REPLY, b"more"], id="longer"),
        pytest.param([REPLY.replace(MARK, b"kvfix lease 2")], id="another mark"),
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


def test_a_connection_that_has_died_unseen_is_made_anew(p: Listening) -> None:
    questions, firewall = LeaseQuestions(), Firewall(p.peer.port)
    peer = p.peer._replace(port=firewall.port)
    try:
        questions.ask(peer, Question("t", "d", AGENTS, 1.0))
        assert [reply.asked for reply in replies(questions, p)] == [1.0]
        firewall.forget()
        asked = 1.0
        for _ in range(8):  # as a read does that finds no answer
            asked += 1.0
            questions.ask(peer, Question("t", "d", AGENTS, asked))
            with contextlib.suppress(HarnessError):
                assert replies(questions, p, seconds=1.0)
                break
        assert 2.0 < asked < 6.0
    finally:
        firewall.close()


def test_a_name_that_is_not_found_out_keeps_nobody_waiting(
    p: Listening, names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_questions, "FRESH", 600.0)
    questions = LeaseQuestions()
    for host in ("hangs", "hangs", "hangs too", "unknown", "x" * 64, "p"):
        asked = lease_questions.now()
        questions.ask(p.peer._replace(host=host), Question("t", host, AGENTS, asked))
    assert [reply.reader for reply in replies(questions, p)] == ["p"]
    questions.ask(p.peer, Question("t", "next", AGENTS, 1.0))
    assert [reply.reader for reply in replies(questions, p)] == ["next"]
    assert names.asked.count("hangs") == names.asked.count("unknown") == 1
    assert names.asked_by.daemon  # D ends all the same


def test_no_more_names_are_kept_than_that(
    p: Listening, names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, fresh = 0.0, lease_questions.FRESH
    monkeypatch.setattr(lease_questions, "now", lambda: now)
    monkeypatch.setattr(lease_questions, "MAX_NAMES", 2)
    questions = LeaseQuestions()
    names.addresses = dict.fromkeys("abc", p.peer.host)
    for host, now in zip("abccba", [0.0] * 3 + [fresh] * 3, strict=True):
        questions.ask(p.peer._replace(host=host), Question("t", host, AGENTS, now))
        assert [reply.reader for reply in replies(questions, p)] == [host]
    assert names.asked == ["a", "b", "c", "a"]


def test_no_more_questions_wait_for_a_name_than_that(
    p: Listening, names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_questions, "MAX_NAMES", 2)
    questions = LeaseQuestions()
    names.addresses["hangs"] = p.peer.host
    for reader in "abc":
        asked = lease_questions.now()
        questions.ask(p.peer._replace(host="hangs"), Question("t", reader, AGENTS, asked))
    names.end.set()
    assert [reply.reader for reply in replies(questions, p, 2)] == ["b", "c"]


@pytest.mark.parametrize("at_once", [False, True])
def test_a_name_goes_where_it_goes_now(
    p: Listening, names: Names, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    """The P that has the address now knows nothing of the lease, and would say that it is gone."""
    context = zmq.Context()
    other = Listening(context.socket(zmq.ROUTER), "127.0.0.2", p.peer.port)
    questions = LeaseQuestions()
    names.addresses["hangs"] = p.peer.host
    names.end.set()
    peer = p.peer._replace(host="hangs")
    questions.ask(peer, Question("t", "before", AGENTS, lease_questions.now()))
    assert [reply.reader for reply in replies(questions, p)] == ["before"]
    names.addresses["hangs"] = other.peer.host
    monkeypatch.setattr(lease_questions, "FRESH", 0.0)
    monkeypatch.setattr(lease_questions, "SLOW", 60.0)
    if at_once:
        monkeypatch.setattr(threading.Thread, "start", threading.Thread.run)
    else:
        names.end.clear()
    for reader in ("after", "again"):
        questions.ask(peer, Question("t", reader, AGENTS, lease_questions.now()))
    names.end.set()
    assert [reply.reader for reply in replies(questions, other, 2)] == ["after", "again"]
    context.destroy(linger=0)


@pytest.mark.parametrize("host", ["hangs", "fails"])
def test_where_names_are_not_found_out_any_more_the_last_address_counts(
    p: Listening, names: Names, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    questions = LeaseQuestions()
    names.addresses = {host: p.peer.host}
    names.end.set()
    peer = p.peer._replace(host=host)
    questions.ask(peer, Question("t", "before", AGENTS, lease_questions.now()))
    assert [reply.reader for reply in replies(questions, p)] == ["before"]
    names.end.clear()
    names.addresses = {}
    monkeypatch.setattr(lease_questions, "FRESH", 0.0)
    asked = lease_questions.now()
    questions.ask(peer, Question("t", "after", AGENTS, asked))
    monkeypatch.setattr(lease_questions, "now", lambda: asked + 0.5)  # and that soon
    assert [reply.reader for reply in replies(questions, p)] == ["after"]


def test_a_question_is_asked_late_rather_than_not_at_all(
    p: Listening, names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where D itself takes longer for a step than P has to answer."""
    questions, late = LeaseQuestions(), 2 * PATIENCE
    names.addresses["hangs"] = "127.0.0.1"
    questions.ask(p.peer._replace(host="hangs"), Question("t", "d", AGENTS, lease_questions.now()))
    assert not questions._connections  # nothing is asked yet
    names.end.set()
    while "hangs" not in questions._names._known:
        time.sleep(0.01)
    monkeypatch.setattr(lease_questions, "now", lambda: time.monotonic() + late)
    assert [reply.reader for reply in replies(questions, p)] == ["d"]


def test_a_question_is_not_kept_for_longer_than_it_is_of_use(
    names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions, now = LeaseQuestions(), 0.0
    monkeypatch.setattr(lease_questions, "now", lambda: now)
    questions.ask(Peer("hangs", 1), Question("t", "d", AGENTS, now))
    for now in (PATIENCE - 0.1, PATIENCE):
        assert not list(questions.replies())
        assert bool(questions._nameless) is (now < PATIENCE)


def test_books_may_be_opened_while_one_is_asked() -> None:
    frame, _ = question_frames(Question("of nobody", "d", AGENTS, 1.0))
    end = threading.Event()

    def open_books() -> None:
        while not end.is_set():
            open_book()  # and is let go at once

    opening = threading.Thread(target=open_books)
    opening.start()
    try:
        for _ in range(2000):
            assert lease_questions.answer(frame) is not None
    finally:
        end.set()
        opening.join()


def test_without_room_for_a_thread_nothing_ends(
    p: Listening, names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    questions = LeaseQuestions()
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refuse)
        questions.ask(p.peer._replace(host="p"), Question("t", "d", AGENTS, lease_questions.now()))
        assert not list(questions.replies())
    assert [reply.reader for reply in replies(questions, p)] == ["d"]


def test_no_more_names_are_looked_up_at_once_than_that(p: Listening, names: Names) -> None:
    questions = LeaseQuestions()
    for number in range(3 * lease_questions.MAX_LOOKUPS):
        host = f"hangs {number}"
        questions.ask(p.peer._replace(host=host), Question("t", host, AGENTS, 1.0))
    assert len(names.asked) <= lease_questions.MAX_LOOKUPS
    assert not list(questions.replies())


def test_a_listener_has_its_pauses_while_it_is_asked(
    p: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a pause vLLM's looks whether it has to end, and what ends the engine waits for that."""
    monkeypatch.setattr(lease_questions, "PAUSE", 0.2)
    questions, end = LeaseQuestions(), threading.Event()

    def ask() -> None:
        while not end.wait(0.02):
            questions.ask(p.peer, Question("t", "d", AGENTS, 1.0))

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        began = time.monotonic()
        assert p.handed_on(10.0) is None
        assert time.monotonic() - began < 5.0
    finally:
        end.set()
        asking.join()


def test_what_a_closed_connection_was_asked_can_be_asked_again(
    p: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_questions, "MAX_PEERS", 1)
    questions = LeaseQuestions()
    questions.ask(p.peer, Question("t", "d", AGENTS, 1.0))
    questions.ask(p.peer._replace(port=1), Question("t", "e", AGENTS, 1.0))
    p.handed_on()
    assert not list(questions.replies())
    questions.ask(p.peer, Question("t", "d", AGENTS, 2.0))
    assert 2.0 in {reply.asked for reply in replies(questions, p)}


def test_no_more_peers_are_kept_than_that(p: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_questions, "MAX_PEERS", 1)
    questions = LeaseQuestions()
    for port in (1, 2, 3):  # where nobody listens
        questions.ask(Peer("127.0.0.1", port), Question("t", "d", AGENTS, 1.0))
    questions.ask(p.peer, Question("t", "last", AGENTS, 1.0))
    assert [reply.reader for reply in replies(questions, p)] == ["last"]


def test_who_was_asked_last_is_kept(p: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_questions, "MAX_PEERS", 2)
    questions = LeaseQuestions()
    for peer in (p.peer, p.peer._replace(port=1), p.peer, p.peer._replace(port=2)):
        questions.ask(peer, Question("t", "d", AGENTS, 1.0))
    assert len(replies(questions, p, 2)) == 2


def test_a_host_that_cannot_be_reached_keeps_nobody_waiting(
    p: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_questions, "MAX_PEERS", 1)
    questions = LeaseQuestions()
    questions.ask(Peer("no such host", 1), Question("t", "d", AGENTS, 1.0))
    questions.ask(p.peer, Question("t", "next", AGENTS, 1.0))
    questions.ask(Peer("fe80::1%a b", 1), Question("t", "d", AGENTS, 1.0))  # none to ZeroMQ
    assert [reply.reader for reply in replies(questions, p)] == ["next"]


def test_who_is_not_asked_any_more_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeroMQ tries for ever to have a connection again, and a client may have named any port."""
    monkeypatch.setattr(lease_questions, "IDLE", 1.0)
    questions = LeaseQuestions()
    with socket.create_server(("127.0.0.1", 0)) as refuses:
        refuses.settimeout(0.05)
        questions.ask(Peer(*refuses.getsockname()), Question("t", "d", AGENTS, 1.0))

        def connects(seconds: float) -> int:
            count, end = 0, time.monotonic() + seconds
            while time.monotonic() < end:
                assert not list(questions.replies())
                with contextlib.suppress(TimeoutError):
                    refuses.accept()[0].close()
                    count += 1
            return count

        assert 1 <= connects(1.5) <= 5
        assert connects(1.5) == 0


def test_who_was_asked_longest_ago_is_left_first(
    p: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions, now = LeaseQuestions(), 0.0
    monkeypatch.setattr(lease_questions, "now", lambda: now)
    for now, peer in ((0.0, p.peer._replace(port=1)), (1.0, p.peer)):
        questions.ask(peer, Question("t", "d", AGENTS, now))
    now = 1.0 + lease_questions.IDLE
    assert not list(questions.replies())
    assert [reply.asked for reply in replies(questions, p)] == [1.0]


def test_a_host_in_brackets_is_an_address(names: Names) -> None:
    """vLLM takes it so for its side channel."""
    context = zmq.Context()
    with context.socket(zmq.ROUTER) as raw:
        raw.setsockopt(zmq.IPV6, 1)
        p = Listening(raw, host="[::1]")
        questions = LeaseQuestions()
        questions.ask(p.peer, Question("t", "d", AGENTS, 1.0))
        assert [reply.reader for reply in replies(questions, p)] == ["d"]
    context.destroy(linger=0)
    assert names.asked == []


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
    questions.ask(Peer("127.0.0.1", 1), Question("t", "d", AGENTS, 1.0))
    assert (some := threads()) > before
    questions.ask(Peer("127.0.0.1", 2), Question("t", "d", AGENTS, 1.0))
    assert threads() == some
    del questions
    assert threads() == before

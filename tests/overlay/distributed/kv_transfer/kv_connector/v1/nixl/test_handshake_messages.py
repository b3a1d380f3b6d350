"""What the handshake's listener gets to see of what a side channel receives."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from vllm_overlay.distributed.kv_transfer.fix_counts import taken
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl import handshake_messages
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.handshake_messages import (
    LONGEST,
    receive_handshake,
)
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.lease_book import Answer, Standing
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.lease_questions import (
    Question,
    answers_questions,
    question_frames,
    read_reply,
)
from vllm_overlay.logging_utils.bounded_log import LINES, BoundedLog

META = b"get_meta_msg"


@pytest.fixture(autouse=True)
def _nothing_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake_messages, "log", BoundedLog(logging.getLogger("vllm.kvfix")))


def packed(*parts: object) -> bytes:
    return msgspec.msgpack.encode(parts)


class Received:
    """A socket that has received some messages, and nothing after them."""

    def __init__(self, *messages: list[bytes]) -> None:
        self.messages = list(messages)

    def recv_multipart(self) -> list[bytes]:
        if not self.messages:
            raise zmq.Again
        return self.messages.pop(0)


def handed_on(parts: int, *messages: list[bytes]) -> list[tuple[bytes, ...]]:
    """What the listener of a release whose handshakes have so many parts gets of them."""
    socket: Any = Received(*messages)
    got: list[tuple[bytes, ...]] = []
    with contextlib.suppress(zmq.Again):
        while True:
            got.append(receive_handshake(socket, parts))
    return got


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param((META, 0), id="a handshake"),
        pytest.param((META, 0, 1), id="of a pipeline's stage"),
        pytest.param((META, 7), id="for a rank that may not be there"),
        pytest.param((META, []), id="for what is no rank"),
        pytest.param(("something else", 0), id="of another kind"),
        pytest.param((META + (LONGEST - len(packed(META, 0))) * b"-", 0), id="as long as may be"),
    ],
)
@pytest.mark.parametrize("between", [b"", b"something"])
def test_what_a_listener_can_read_it_gets_as_it_came(
    asked: tuple[object, ...], between: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    message = [b"who", between, packed(*asked)]
    assert handed_on(len(asked), message) == [tuple(message)]
    assert caplog.messages == []
    assert taken() == {}


@pytest.mark.parametrize(
    "frames",
    [
        pytest.param([b""], id="no message"),
        pytest.param([packed(META, 0)], id="too few frames"),
        pytest.param([b"", b"", packed(META, 0)], id="too many frames"),
        pytest.param([b"", packed(META, 0), b""], id="a frame behind it"),
        pytest.param([b"", b""], id="empty"),
        pytest.param([b"", b"\xc1"], id="no msgpack"),
        pytest.param([b"", b"\xa1\xff"], id="no Unicode"),
        pytest.param([b"", b"\x92\x00\x81\x80\x00"], id="a key that cannot be one"),
        pytest.param([b"", b"\x07"], id="a number"),
        pytest.param([b"", b"\xa2ab"], id="a text of two"),
        pytest.param([b"", b"\x82\x00\x00\x01\x00"], id="a map of two"),
        pytest.param([b"", packed(META, 0) + b"\x00"], id="more behind it"),
        pytest.param([b"", b"\xdd\xff\xff\xff\xff"], id="less than it says"),
        pytest.param([b"", b"\x92" + 100_000 * b"\x91" + b"\x00\x00"], id="too deep"),
        # Python 3.11 decodes it and cannot write it.
        pytest.param([b"", b"\x92" + 985 * b"\x91" + b"\x00\x00"], id="too deep for the log"),
        pytest.param([b"", packed(LONGEST * b"-", 0)], id="too long"),
        pytest.param([b"", packed()], id="an empty list"),
        pytest.param([b"", packed(0)], id="a list of one"),
        pytest.param([b"", packed(0, 1, 2)], id="a list of three"),
    ],
)
def test_the_rest_is_logged_and_counted(
    frames: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    good = [b"who", b"", packed(META, 0)]
    assert handed_on(2, [b"stranger", *frames], good) == [tuple(good)]
    [line] = caplog.messages
    assert "no handshake" in line and "b'stranger " in line
    assert len(line) < 600
    assert taken() == {"NO_HANDSHAKE": 1}


@pytest.mark.parametrize(("theirs", "ours"), [((META, 0), 3), ((META, 0, 0), 2)])
def test_a_handshake_of_another_release_is_called_that(
    theirs: tuple[object, ...], ours: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert handed_on(ours, [b"who", b"", packed(*theirs)]) == []
    [line] = caplog.messages
    assert f"another vLLM release, of {len(theirs)} parts instead of {ours}, which" in line


def test_a_scan_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    assert handed_on(2, *([b"stranger", b"%d" % i] for i in range(1000))) == []
    assert len(caplog.messages) == LINES
    assert taken() == {"NO_HANDSHAKE": 1000}


def test_a_listener_has_its_pauses_whatever_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pause vLLM's looks whether it has to end, and what ends the engine waits for that."""
    monkeypatch.setattr(handshake_messages, "PAUSE", -1.0)
    good = [b"who", b"", packed(META, 0)]
    socket: Any = Received([b"stranger"], good, [b"stranger"], [b"stranger"])
    for left in (3, 1, 0):
        with pytest.raises(zmq.Again):
            receive_handshake(socket, 2)
        assert len(socket.messages) == left
        if left == 3:
            assert receive_handshake(socket, 2) == tuple(good)


@pytest.fixture
def sockets() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    """A side channel, and a peer that is connected to it."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as here:
        here.setsockopt(zmq.RCVTIMEO, 500)
        port = here.bind_to_random_port("tcp://127.0.0.1")
        with context.socket(zmq.DEALER) as peer:
            peer.connect(f"tcp://127.0.0.1:{port}")
            yield here, peer


def test_questions_about_leases_are_answered_in_between(
    sockets: tuple[zmq.Socket[bytes], zmq.Socket[bytes]],
) -> None:
    """With K20 the listener's socket is not ZeroMQ's own."""
    raw, peer = sockets
    question = Question("of nobody", "d", frozenset(), 1.5)
    peer.send_multipart([b"", b"no handshake"])
    peer.send_multipart(question_frames(question))
    peer.send_multipart([b"", packed(META, 0)])
    with answers_questions(contextlib.nullcontext(raw)) as socket:
        _, *rest = receive_handshake(socket, 2)
        with pytest.raises(zmq.Again):
            receive_handshake(socket, 2)
    assert rest == [b"", packed(META, 0)]
    reply = read_reply(peer.recv_multipart())
    assert reply is not None
    assert reply.answer == Answer(Standing.GONE, 0.0)

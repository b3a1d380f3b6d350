"""K23: after a message that is no handshake, peers can still shake hands.

The listener is the connector's own, and so is the handshake of the peer that comes afterwards.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from tests.support.hurried_clock import Clock
from tests.support.lease_pair import PrefillServer, prefill_server
from tests.support.nixl_release import GET_META_MSG
from tests.support.nixl_worker import STAGES, make_worker

# Threads that end so are what this is about.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

ARRIVED = 0.3
"""Seconds in which a message is there, on the loopback interface, and has been looked at."""

RANKS = [0] * (1 + STAGES)
HANDSHAKE = msgspec.msgpack.encode([GET_META_MSG, *RANKS])

SCRAPE = b"""\
GET /metrics HTTP/1.1\r
Host: prefill-0:5600\r
User-Agent: Prometheus/2.42.0\r
Accept: application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;\
q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1\r
Accept-Encoding: gzip\r
X-Prometheus-Scrape-Timeout-Seconds: 10\r
\r
"""

REMOTE_DESKTOP = bytes([3, 0, 0, 11, 6, 0xE0, 0, 0, 0, 0, 0])
"""The first bytes of a connection, of a client or a scanner."""


@pytest.fixture
def p() -> Iterator[PrefillServer]:
    with prefill_server() as server:
        yield server


def port(p: PrefillServer) -> int:
    return int(p.part.side_channel_port)


def shakes_hands(p: PrefillServer) -> bool:
    """Whether the worker of a D that P has not met can shake hands with P."""
    worker = make_worker(engine_id="reader")
    sizes = (1, 1) if STAGES else ()
    listener = p.part._nixl_handshake_listener_t
    try:
        with Clock().hurries(lambda _: not listener.is_alive()):  # nobody will ever answer
            return bool(worker._nixl_handshake("127.0.0.1", port(p), 1, p.worker.engine_id, *sizes))
    except zmq.Again:  # no answer
        return False
    finally:
        worker._handshake_initiation_executor.shutdown(cancel_futures=True)


@pytest.mark.parametrize(
    "frames",
    [
        pytest.param([b""], id="no message"),
        pytest.param([HANDSHAKE], id="too few frames"),
        pytest.param([b"", b"", HANDSHAKE], id="too many frames"),
        pytest.param([b"", b""], id="empty"),
        pytest.param([b"", b"\xc1"], id="no msgpack"),
        pytest.param([b"", b"\xa1\xff"], id="no Unicode"),
        pytest.param([b"", b"\x07"], id="no list"),
        pytest.param([b"", HANDSHAKE + b"\x00"], id="more behind it"),
        pytest.param([b"", b"\x92" + 100_000 * b"\x91" + b"\x00\x00"], id="too deep"),
        pytest.param([b"", msgspec.msgpack.encode([GET_META_MSG, *RANKS, 0])], id="more parts"),
        pytest.param([b"", msgspec.msgpack.encode([GET_META_MSG, *RANKS[1:]])], id="fewer parts"),
    ],
)
def test_after_a_message_that_is_no_handshake(p: PrefillServer, frames: list[bytes]) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.connect(f"tcp://127.0.0.1:{port(p)}")
        stranger.send_multipart(frames)
        time.sleep(ARRIVED)
    assert shakes_hands(p)


@pytest.mark.parametrize(
    "said", [pytest.param(SCRAPE, id="HTTP"), pytest.param(REMOTE_DESKTOP, id="RDP")]
)
def test_after_bytes_of_another_protocol(p: PrefillServer, said: bytes) -> None:
    """ZeroMQ takes them for a message of its first version."""
    with socket.create_connection(("127.0.0.1", port(p))) as line:
        line.sendall(said)
        time.sleep(ARRIVED)
        assert shakes_hands(p)

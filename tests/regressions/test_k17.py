"""K17: a decode server connects to the peers that its operator names, and to nobody else."""

from __future__ import annotations

import functools
import socket
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from tests.support import decode_engine
from tests.support.idle_engine import IdleEngine
from tests.support.nixl_worker import attempt, connect, make_worker, nixl_of

PROMPT = range(40)  # three blocks of 16 tokens

NAMED = ["10.8.0.0/16", "prefill-0.example", "*.prefill.example", "[fd00::/8]:5600-5663"]


@pytest.fixture
def stranger() -> Iterator[socket.socket]:
    """Whoever listens on a port of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(1.0)
        yield listening


def engine_with(*peers: str, **changes: Any) -> IdleEngine:  # noqa: ANN401 - what clients send
    """An engine whose operator has named peers, and whose client has named one."""
    made = functools.partial(make_worker, extra_config={"allowed_peers": [*peers]})
    with mock.patch.object(decode_engine, "make_worker", made):
        engine = IdleEngine()
    engine.ask("by-client", PROMPT, [[1, 2, 3]])
    params = engine.scheduler.requests["by-client"].kv_transfer_params
    assert params is not None
    params |= changes
    return engine


def somebody_comes(listening: socket.socket) -> bool:
    try:
        listening.accept()[0].close()
    except TimeoutError:
        return False
    return True


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.1"])
def test_what_is_to_be_read_from_a_stranger_is_computed_here(
    stranger: socket.socket, host: str
) -> None:
    engine = engine_with(*NAMED, remote_host=host, remote_port=stranger.getsockname()[1])
    step = attempt(engine.step)
    assert not somebody_comes(stranger)
    assert isinstance(step, decode_engine.Step)
    assert step.computed == {"by-client": (0, len(PROMPT))}
    assert attempt(engine.run) is True


def test_a_stranger_is_not_told_of_a_request_that_will_not_read(stranger: socket.socket) -> None:
    """As every request ends that its client leaves, or that is rejected."""
    engine = engine_with(*NAMED, remote_host="127.0.0.1", remote_port=stranger.getsockname()[1])
    engine.abort("by-client")
    attempt(engine.step)
    assert not somebody_comes(stranger)
    assert attempt(engine.run) is True


def test_another_port_of_a_peer_is_a_stranger(stranger: socket.socket) -> None:
    port = stranger.getsockname()[1]
    engine = engine_with(f"127.0.0.1:{port - 1}", remote_host="127.0.0.1", remote_port=port)
    attempt(engine.step)
    assert not somebody_comes(stranger)


def test_nothing_is_read_from_a_peer_that_is_no_longer_named() -> None:
    """D is connected to it, perhaps by a client that named it otherwise."""
    engine = engine_with(*NAMED)
    connect(engine.worker, "P")
    attempt(engine.run, 0.5)  # there is no more to see where it waits for a read to end
    assert nixl_of(engine.worker).reads == []
    assert nixl_of(engine.worker).heard == {}

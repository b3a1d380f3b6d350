"""41806: an engine that Ray runs on another node listens for handshakes on that node.

vLLM's own manager starts the ranks, by a Ray that makes no processes (`tests.support.ray_actors`).
The server is started with an address of its own node, at which nobody can listen here; what is
another node's, the loopback interface has. The listener is the connector's own, and so is the
handshake of the peer.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from tests.support.nixl_worker import STAGES, make_vllm_config, make_worker
from tests.support.ray_actors import ELSEWHERE, HOST, Actor, Node, actors, announced, nixl_part

# A thread that ends so is what this is about.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

DRIVERS = ELSEWHERE[0]

OTHER = Node("127.0.0.2")

SOON = 10.0
"""Seconds; a listener is there at once, or never."""


@contextlib.contextmanager
def started(host: str = DRIVERS, *, moe: bool = False, later: int = 0) -> Iterator[list[Actor]]:
    with actors(make_vllm_config(engine_id="prefill"), {HOST: host}, later=later, moe=moe) as made:
        yield made


@pytest.fixture(autouse=True)
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    """The port of rank 1: one that is free everywhere."""
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("", 0))
        number = int(probe.getsockname()[1])
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(number - 1))
    return number


@pytest.mark.parametrize("moe", [False, True])
def test_it_announces_an_address_of_its_node(port: int, moe: bool) -> None:
    with started(moe=moe) as made, made[1].on(OTHER) as config:
        assert announced(nixl_part(config)) == ("127.0.0.2", port)


def test_a_name_of_the_drivers_node_is_no_address_here(port: int) -> None:
    """A name that another node does not know."""
    with started("driver.invalid") as made, made[1].on(OTHER) as config:
        assert announced(nixl_part(config)) == ("127.0.0.2", port)


def test_it_announces_what_is_set_on_its_node(port: int) -> None:
    node = Node("127.0.0.2", {HOST: "127.0.0.3"})
    with started() as made, made[1].on(node) as config:
        assert announced(nixl_part(config)) == ("127.0.0.3", port)


def test_so_does_one_that_comes_later() -> None:
    with started(later=1) as made, made[2].on(OTHER) as config:
        host, _ = announced(nixl_part(config))
        assert host == "127.0.0.2"


def listens(part: Any) -> bool:  # noqa: ANN401 - of a release
    """Let the engine offer its worker's metadata, as it does when it starts: does it go on?"""
    rank = (0, 0) if STAGES else 0
    said = {rank: make_worker(engine_id="prefill").xfer_handshake_metadata}
    starts = threading.Thread(target=part.set_xfer_handshake_metadata, args=(said,), daemon=True)
    starts.start()
    starts.join(SOON)
    return not starts.is_alive()


def test_it_starts_and_peers_shake_hands_with_it() -> None:
    with started() as made, made[1].on(OTHER) as config:
        part = nixl_part(config)
        assert listens(part), "it waits for its listener for ever"
        reader = make_worker(engine_id="reader")
        try:
            place = announced(part)
            sizes = (1, 1) if STAGES else ()
            agents = reader._nixl_handshake(*place, 1, "prefill", *sizes)
        except zmq.Again:  # no answer
            agents = {}
        finally:
            part._stop_event.set()
            reader._handshake_initiation_executor.shutdown(cancel_futures=True)
        assert agents

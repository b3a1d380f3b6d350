"""Where an actor of Ray's listens, and where that is what it was on stock."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from tests.support.nixl_worker import make_vllm_config
from tests.support.ray_actors import ELSEWHERE, HOST, Node, actors, announced, nixl_part

pytest.importorskip("vllm_overlay.v1.engine.side_channel", reason="up to 0.21.0")

from vllm_overlay.v1.engine import side_channel
from vllm_overlay.v1.engine.side_channel import OF_DRIVER, hand_over_host, take_host

DRIVERS, ANOTHER, THIRD = ELSEWHERE

NODE = "127.0.0.2"


@pytest.fixture(autouse=True)
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    """The port of rank 1: one that is free everywhere."""
    monkeypatch.delenv(HOST, raising=False)
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("", 0))
        number = int(probe.getsockname()[1])
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(number - 1))
    return number


@contextlib.contextmanager
def taken(host: str, port: int) -> Iterator[None]:
    """Somebody else listens there."""
    with contextlib.closing(socket.socket()) as other:
        other.bind((host, port))
        other.listen()
        yield


def host_of_actor(
    driver: str | None,
    own: str | None = None,
    address: str = NODE,
    config: Any = None,  # noqa: ANN401 - of a release
) -> str | None:
    """The host in the environment of rank 1, on a node that goes by `address`."""
    node = Node(address, {} if own is None else {HOST: own})
    config = config or make_vllm_config(engine_id="prefill")
    environment = {} if driver is None else {HOST: driver}
    with actors(config, environment) as made, made[1].on(node):
        assert OF_DRIVER not in os.environ
        return os.environ.get(HOST)


@pytest.mark.parametrize("own", [None, "127.0.0.3"])
@pytest.mark.parametrize("driver", ["127.0.0.1", "127.0.0.4", "0.0.0.0", "localhost"])  # noqa: S104
def test_a_host_at_which_the_node_can_listen_stays(driver: str, own: str | None) -> None:
    assert host_of_actor(driver, own) == driver


def test_so_does_one_of_the_sixth_version() -> None:
    try:
        with contextlib.closing(socket.socket(socket.AF_INET6)) as probe:
            probe.bind(("::1", 0))
        expected = "::1"
    except OSError:  # none here
        expected = NODE
    assert host_of_actor("::1") == expected


def test_so_does_one_whose_port_somebody_has(port: int) -> None:
    """It is a node's own all the same; the listener says what is wrong."""
    with taken("127.0.0.1", port):
        assert host_of_actor("127.0.0.1", "127.0.0.3") == "127.0.0.1"


@pytest.mark.parametrize("own", [None, "127.0.0.3", "localhost"])
def test_without_the_drivers_an_actor_has_its_nodes(own: str | None) -> None:
    assert host_of_actor(None, own) == own


def test_without_any_it_announces_what_stock_does() -> None:
    config = make_vllm_config(engine_id="prefill")
    with actors(config, {}) as made, made[1].on(Node(NODE)) as own:
        assert announced(nixl_part(own))[0] == "localhost"


def test_one_that_ray_gives_to_all_nodes_is_tried_too() -> None:
    """In the environment that Ray was told of, not in the driver's."""
    assert host_of_actor(None, DRIVERS) == NODE


def test_elsewhere_it_is_the_nodes_own() -> None:
    assert host_of_actor(DRIVERS, "127.0.0.3") == "127.0.0.3"


def test_a_nodes_own_that_is_no_address_of_it_either() -> None:
    assert host_of_actor(DRIVERS, ANOTHER) == NODE


def test_a_nodes_own_that_is_taken(port: int) -> None:
    with taken("127.0.0.3", port):
        assert host_of_actor(DRIVERS, "127.0.0.3") == NODE


@pytest.mark.parametrize("address", [THIRD, ""])
def test_where_nothing_else_can_be_listened_at_either(address: str) -> None:
    assert host_of_actor(DRIVERS, address=address) == DRIVERS


def test_an_empty_one_is_none() -> None:
    assert host_of_actor(DRIVERS, "") == NODE


def test_the_operator_is_told() -> None:
    with mock.patch.object(side_channel.logger, "info") as info:
        host_of_actor(DRIVERS)
    text, *values = info.call_args.args
    assert text % tuple(values) == (
        "NIXL's side channel: 240.0.0.1 is not on this node, 127.0.0.2 is taken"
    )


def test_of_several_connectors_one_is_nixl() -> None:
    several = {
        "connectors": [
            {"kv_connector": "ExampleConnector", "kv_role": "kv_both"},
            {"kv_connector": "NixlConnector", "kv_role": "kv_both"},
        ]
    }
    config = make_vllm_config(engine_id="prefill", connector="MultiConnector", extra_config=several)
    assert host_of_actor(DRIVERS, config=config) == NODE


@pytest.mark.parametrize("connector", ["ExampleConnector", None])
def test_without_nixl_nothing_is_listened_at(connector: str | None) -> None:
    config = make_vllm_config(engine_id="prefill")
    if connector is None:
        config.kv_transfer_config = None
    else:
        config.kv_transfer_config.kv_connector = connector
    with mock.patch.object(side_channel, "_listening_fails", mock.Mock()) as listening:
        assert host_of_actor(DRIVERS, "127.0.0.3", config=config) == DRIVERS
    assert not listening.called


def test_the_drivers_environment_is_handed_over_once() -> None:
    given = {HOST: "10.0.0.1", "VLLM_OTHER": "as it was"}
    hand_over_host(given)
    hand_over_host(given)
    assert given == {OF_DRIVER: "10.0.0.1", "VLLM_OTHER": "as it was"}


def test_outside_ray_nothing_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """No host, and none handed over: not even Ray is asked."""
    monkeypatch.setitem(sys.modules, "ray", None)
    take_host(make_vllm_config(engine_id="prefill"))
    assert HOST not in os.environ

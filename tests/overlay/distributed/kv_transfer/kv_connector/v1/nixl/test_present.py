"""Which connectors count as NIXL's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

present = pytest.importorskip(
    "vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.present", reason="up to 0.26.0"
)


NixlConnector = KVConnectorFactory.get_connector_class_by_name("NixlConnector")


class Offloading:
    """Somebody else's connector."""


class Derived(NixlConnector):  # type: ignore[valid-type, misc]
    """A connector made from NIXL's."""


def blank(kind: type) -> object:
    return object.__new__(kind)


@pytest.mark.parametrize(
    ("kinds", "so"),
    [
        pytest.param([NixlConnector], True, id="alone"),
        pytest.param([Derived], True, id="a kind of it"),
        pytest.param([Offloading, NixlConnector], True, id="behind another"),
        pytest.param([Offloading], False, id="none of it"),
        pytest.param([], False, id="nobody"),
    ],
)
def test_nixl_is_found_alone_and_among_several(kinds: list[type], so: bool) -> None:
    inside = [blank(kind) for kind in kinds]
    for held in (inside, tuple(inside)):
        several = SimpleNamespace(_connectors=held)
        assert present.transfers_with_nixl(cast("Any", several)) is so


@pytest.mark.parametrize(("kind", "so"), [(NixlConnector, True), (Offloading, False)])
def test_a_connector_that_stands_alone(kind: type, so: bool) -> None:
    assert present.transfers_with_nixl(cast("Any", blank(kind))) is so


def test_no_connector_transfers_nothing() -> None:
    assert not present.transfers_with_nixl(None)


@pytest.mark.parametrize(
    ("chosen", "loads"),
    [(None, None), ({}, None), ({"other": 1}, None), ({"asked": 0}, 0), ({"asked": 1}, 1)],
)
def test_of_several_the_one_that_was_chosen_loads(chosen: object, loads: int | None) -> None:
    several = SimpleNamespace(_requests_to_connector=chosen, _connectors=["first", "second"])
    found = present.loader_of(
        cast("Any", SimpleNamespace(connector=several)),
        cast("Any", SimpleNamespace(request_id="asked")),
    )
    assert found == (several if loads is None else several._connectors[loads])

"""Whose reads the scheduler waits for, and that it hands on everything else as it is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from tests.support.lease_pair import decode_server
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.multi_connector import PassesLooksOn
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.confirmed_reads import (
    confirmed_reads,
)
from vllm_overlay.v1.core.sched.confirmed_reads import hears_of_confirmed

OUTPUT = SimpleNamespace(kv_connector_output=None)


def update(scheduler: Any, decided: object, output: object) -> object:  # noqa: ANN401
    assert decided == "decided"
    return output


def handed_on(connector: object) -> object:
    return hears_of_confirmed(update)(SimpleNamespace(connector=connector), "decided", OUTPUT)


@pytest.mark.parametrize(
    "connector",
    [
        pytest.param(None, id="none"),
        pytest.param(object(), id="somebody else's"),
        pytest.param(mock.MagicMock(), id="a stand-in"),
    ],
)
def test_without_nixl_a_report_is_handed_on(connector: object) -> None:
    assert handed_on(connector) is OUTPUT


@pytest.mark.parametrize("among", [False, True])
def test_with_nixl_a_report_is_settled_first(among: bool) -> None:
    connector: Any = decode_server().scheduler.connector
    reads = confirmed_reads(connector.connector_scheduler)
    assert reads is not None
    if among:
        several: Any = type("Several", (PassesLooksOn,), {})()
        several._connectors = [object(), connector]
        connector = several
    with mock.patch.object(reads, "settle", lambda scheduler, output: ("settled", output)):
        assert handed_on(connector) == ("settled", OUTPUT)


@pytest.mark.parametrize("extra", [{}, {"confirm_reads": False}], ids=str)
def test_an_engine_that_has_read_nothing_has_nothing_to_settle(extra: dict[str, Any]) -> None:
    assert handed_on(decode_server(extra_config=extra).scheduler.connector) is OUTPUT

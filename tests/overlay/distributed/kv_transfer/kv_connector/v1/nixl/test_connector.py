"""When an idle engine is asked to look after its notifications, and when no longer."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.outputs import KVConnectorOutput

from tests.support.nixl_release import connector_module
from tests.support.nixl_worker import make_kv_cache_config, make_vllm_config
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl import connector as overlay
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.connector import (
    RARELY,
    SOON,
    WakesIdleEngine,
    WorkerReport,
)


@pytest.fixture
def connector() -> Any:  # noqa: ANN401 - the release's class, with our base
    """The scheduler's side of the release's own NIXL connector."""
    return connector_module.NixlConnector(
        make_vllm_config(), KVConnectorRole.SCHEDULER, make_kv_cache_config()
    )


def report(connector: Any, pending: int) -> None:  # noqa: ANN401
    connector.update_connector_output(
        KVConnectorOutput(kv_connector_worker_meta=WorkerReport(pending))
    )


def test_looks_become_rarer_until_there_is_news(connector: Any) -> None:  # noqa: ANN401
    def pause() -> float:
        return (connector.next_look() or 0.0) - time.monotonic()

    report(connector, 4)
    pauses = []
    for _ in range(12):
        connector.looks()
        pauses.append(pause())
        report(connector, 4)
    assert pauses[0] < 3 * SOON
    assert all(later > 1.5 * sooner for sooner, later in itertools.pairwise(pauses[:6]))
    assert 0.9 * RARELY < pauses[-1] <= RARELY
    report(connector, 3)
    assert pause() <= SOON


def test_nothing_to_look_at(connector: Any) -> None:  # noqa: ANN401
    connector.looks()
    assert connector.next_look() is None
    report(connector, 1)
    assert connector.next_look() is not None
    connector.update_connector_output(KVConnectorOutput())  # no news
    assert connector.next_look() is not None
    report(connector, 0)
    assert connector.next_look() is None


def test_reports_of_several_ranks() -> None:
    joined = WorkerReport(2).aggregate(WorkerReport(0)).aggregate(WorkerReport(3))
    assert joined.pending == 5


def test_a_worker_reports_while_something_waits_and_once_that_nothing_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waiting = iter([0, 2, 2, 0, 0])
    monkeypatch.setattr(overlay, "pending_notifications", lambda worker: next(waiting))
    side: Any = WakesIdleEngine()
    side.connector_worker = object()
    reports = [side.build_connector_worker_meta() for _ in range(5)]
    assert [made and made.pending for made in reports] == [None, 2, 2, 0, None]

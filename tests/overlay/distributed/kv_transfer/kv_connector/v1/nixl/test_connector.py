"""When an idle engine is asked to look after its notifications, and when no longer."""

from __future__ import annotations

import functools
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.outputs import KVConnectorOutput

from tests.support.nixl_release import connector_module
from tests.support.nixl_worker import make_kv_cache_config, make_vllm_config
from vllm_overlay.distributed.kv_transfer.fix_counts import Acted, count
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl import connector as overlay
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl import unseen_ends
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.claims import ClaimsBlocks
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.connector import (
    RARELY,
    SOON,
    WakesIdleEngine,
    WantsLooks,
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


def test_looks_become_rarer_until_there_is_news(
    connector: Any,  # noqa: ANN401
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(overlay, "time", SimpleNamespace(monotonic=lambda: 8.0))

    def pause() -> float:
        return (connector.next_look() or 0.0) - 8.0

    report(connector, 4)
    pauses = []
    for _ in range(12):
        connector.looks()
        pauses.append(pause())
        report(connector, 4)
    assert pauses[0] == pytest.approx(2 * SOON)
    assert all(later > 1.5 * sooner for sooner, later in itertools.pairwise(pauses[:6]))
    assert pauses[-1] == RARELY
    report(connector, 3)
    assert pause() == pytest.approx(SOON)
    connector.looks()
    assert pause() == pytest.approx(pauses[0])


def test_nothing_to_look_at(connector: Any) -> None:  # noqa: ANN401
    connector.looks()
    assert connector.next_look() is None
    report(connector, 1)
    assert connector.next_look() is not None
    connector.update_connector_output(KVConnectorOutput())  # no news
    assert connector.next_look() is not None
    report(connector, 0)
    assert connector.next_look() is None
    assert connector.build_connector_worker_meta() is None, "a worker does"


def test_whoever_wants_looks_says_when() -> None:
    for asked in (WantsLooks().next_look, WantsLooks().looks):
        with pytest.raises(NotImplementedError):
            asked()


def test_reports_of_several_ranks() -> None:
    said = [
        WorkerReport(2, frozenset({"a"}), {"r": frozenset({"d/0"})}, fixes={"USED_TWICE": 1}),
        WorkerReport(0, frozenset({"b"}), {"r": frozenset({"d/1"}), "s": frozenset({"d/0"})}),
        WorkerReport(3, ended=frozenset({"t"}), fixes={"USED_TWICE": 2}),
        WorkerReport(0, unseen={"u": True, "v": True, "w": False}),
        WorkerReport(0, unseen={"v": False, "w": True, "x": True}),
    ]
    joined = functools.reduce(WorkerReport.aggregate, said)
    assert joined.pending == 5
    assert joined.agents == {"a", "b"}
    assert joined.heard == {"r": {"d/0", "d/1"}, "s": {"d/0"}}
    assert joined.ended == {"t"}
    assert joined.fixes == {"USED_TWICE": 3}
    assert joined.unseen == {"u": True, "v": False, "w": False, "x": True}
    other: Any = object()
    assert joined.aggregate(other) is joined, "another connector's"


def test_a_worker_reports_while_something_waits_and_once_that_nothing_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waiting = iter([0, 2, 2, 0, 0])
    monkeypatch.setattr(overlay, "pending_notifications", lambda worker: next(waiting))
    side: Any = WakesIdleEngine()
    side.connector_worker = SimpleNamespace(nixl_wrapper=SimpleNamespace(name=None))
    reports = [side.build_connector_worker_meta() for _ in range(5)]
    assert [made and made.pending for made in reports] == [None, 2, 2, 0, None]


def test_a_worker_says_once_who_it_is_and_what_it_has_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(overlay, "pending_notifications", lambda worker: 0)
    side: Any = WakesIdleEngine()
    worker = side.connector_worker = SimpleNamespace(nixl_wrapper=SimpleNamespace(name="p/0"))
    assert side.build_connector_worker_meta() == WorkerReport(0, frozenset({"p/0"}))
    assert side.build_connector_worker_meta() is None
    for news in ({"heard": {"r": frozenset({"d/0"})}}, {"ended": frozenset({"s"})}):
        worker._heard, worker._ended_leases = news.get("heard", {}), news.get("ended", ())
        assert side.build_connector_worker_meta() == WorkerReport(0, **news)
        assert side.build_connector_worker_meta() is None
    count(Acted.USED_TWICE)
    assert side.build_connector_worker_meta() == WorkerReport(0, fixes={"USED_TWICE": 1})
    assert side.build_connector_worker_meta() is None


@pytest.mark.parametrize("reads", [True, False])
def test_only_a_worker_that_reads_looks_at_its_receives(
    monkeypatch: pytest.MonkeyPatch, reads: bool
) -> None:
    """One that is pushed to keeps those that nobody will push, for good, as on stock."""
    monkeypatch.setattr(overlay, "pending_notifications", lambda worker: 0)
    side: Any = type("Connector", (ClaimsBlocks,) * reads + (WakesIdleEngine,), {})()
    worker = side.connector_worker = SimpleNamespace(nixl_wrapper=SimpleNamespace(name=None))
    for _ in range(2):
        side.build_connector_worker_meta()
    assert ("_unseen_ends" in vars(worker)) is reads


def test_that_a_read_has_ended_unseen_is_news(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(unseen_ends, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(overlay, "pending_notifications", lambda worker: 0)
    side: Any = type("Connector", (ClaimsBlocks, WakesIdleEngine), {})()
    worker = side.connector_worker = SimpleNamespace(nixl_wrapper=SimpleNamespace(name=None))
    worker._recving_metadata, worker._recving_transfers = {"d": None}, {"d": [1]}
    assert side.build_connector_worker_meta() is None
    now[0], worker._recving_transfers = 2 * unseen_ends.LONG, {}
    assert side.build_connector_worker_meta() == WorkerReport(0, unseen={"d": True})
    assert side.build_connector_worker_meta() is None

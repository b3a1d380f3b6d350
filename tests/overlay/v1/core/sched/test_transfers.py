"""Which reports of transfers a scheduler acts on: each transfer of a request that ended, once."""

from __future__ import annotations

import itertools
import logging
from typing import Any
from unittest import mock

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from tests.support.decode_engine import DecodeEngine
from tests.support.nixl_worker import connect
from vllm_overlay.distributed.kv_transfer.fix_counts import taken
from vllm_overlay.logging_utils.bounded_log import BoundedLog
from vllm_overlay.v1.core.sched import transfers

REPORTS = ("finished_recving", "finished_sending")


@pytest.fixture
def engine() -> DecodeEngine:
    made = DecodeEngine()
    connect(made.worker, "P")
    return made


def saves_what_finishes(engine: DecodeEngine) -> None:
    for hook in ("request_finished", "request_finished_all_groups"):
        setattr(engine.scheduler.connector, hook, lambda *_: (True, None))


def leave(engine: DecodeEngine, req_id: str) -> set[int]:
    """A client leaves while its prompt's KV is received; the request's blocks."""
    engine.ask(req_id, range(40), [[5, 6, 7]])
    engine.step()
    blocks = engine.blocks_of(req_id)
    engine.scheduler.finish_requests(req_id, RequestStatus.FINISHED_ABORTED)
    return blocks


def report(engine: DecodeEngine, **ids: str) -> None:
    engine.scheduler._update_from_kv_xfer_finished(
        KVConnectorOutput(**{name: {req_id} for name, req_id in ids.items()})
    )


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("order", itertools.product(REPORTS, repeat=3), ids=repr)
def test_blocks_are_free_after_the_last_transfer_and_not_before(
    engine: DecodeEngine, saves: bool, order: tuple[str, ...]
) -> None:
    if saves:
        saves_what_finishes(engine)
    blocks = leave(engine, "left")
    awaited = {"finished_recving", "finished_sending"} if saves else {"finished_recving"}
    for name in order:
        report(engine, **{name: "left"})
        awaited.discard(name)
        assert blocks.isdisjoint(engine._reusable()) == bool(awaited)
        assert ("left" in engine.scheduler.requests) == bool(awaited)
    if not awaited:
        assert len(engine.scheduler._under_way) == 0


def test_a_request_that_is_sent_after_it_ended_is_freed_once(engine: DecodeEngine) -> None:
    """As on a prefill server."""
    saves_what_finishes(engine)
    engine.ask("sent", range(40), max_tokens=1)
    engine.step()
    blocks = engine.blocks_of("sent")
    report(engine, finished_recving="sent")
    assert blocks.isdisjoint(engine._reusable()), "it is sent yet"
    report(engine, finished_sending="sent")
    assert blocks <= engine._reusable()


def test_the_connector_hears_of_every_report(engine: DecodeEngine) -> None:
    heard: list[KVConnectorOutput] = []
    engine.scheduler.connector.update_connector_output = heard.append
    report(engine, finished_sending="nobody")
    assert [output.finished_sending for output in heard] == [{"nobody"}]


def test_a_scheduler_that_does_not_say_why_it_holds_blocks_frees_them_at_the_first_report(
    engine: DecodeEngine,
) -> None:
    """One derived from vLLM's that frees requests in its own way, as on stock."""
    blocks = leave(engine, "left")
    engine.scheduler._under_way.clear()
    report(engine, finished_sending="left")
    assert blocks <= engine._reusable()
    report(engine, finished_recving="left")


def test_where_a_plugin_asks_the_connector_itself_the_first_report_frees(
    engine: DecodeEngine,
) -> None:
    """As on stock: it does not say who loads, who may be somebody that reports one end of two."""
    engine.scheduler._connector_finished = lambda request: (True, None)
    blocks = leave(engine, "left")
    report(engine, finished_recving="left")
    assert blocks <= engine._reusable()


def test_who_keeps_encoder_outputs_sends_no_kv(engine: DecodeEngine) -> None:
    """It answers for itself, from 0.26.0 on, and nobody will say that a send is over."""
    scheduler: Any = engine.scheduler
    scheduler.ec_connector = mock.Mock()
    scheduler.ec_connector.request_finished.return_value = True, None
    scheduler.ec_connector.take_unavailable_requests.return_value = ()  # asked in 0.33.0
    leave(engine, "left")
    report(engine, finished_recving="left")
    assert "left" not in scheduler.requests


def test_both_reports_at_once_of_such_a_request_free_it_once(engine: DecodeEngine) -> None:
    leave(engine, "left")
    engine.scheduler._under_way.clear()
    report(engine, finished_recving="left", finished_sending="left")
    assert engine.scheduler.requests == {}


def test_what_nobody_awaits_is_logged(
    engine: DecodeEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "log", BoundedLog(logging.getLogger("vllm.kvfix")))
    engine.ask("running", range(40))
    engine.step()
    with caplog.at_level(logging.WARNING):
        report(engine, finished_recving="running", finished_sending="gone")
    assert [record.getMessage() for record in caplog.records] == [
        "The KV connector is done receiving for request running, which the scheduler does not await"
        " (RUNNING).",
        "The KV connector is done sending for request gone, which the scheduler does not await"
        " (it is gone).",
    ]
    assert taken() == {"UNAWAITED_END": 2}


def test_a_request_that_waits_is_scheduled_when_it_is_received(engine: DecodeEngine) -> None:
    engine.ask("waits", range(40), [[5, 6, 7]])
    engine.step()
    report(engine, finished_sending="waits")
    assert engine.step().computed == {}
    report(engine, finished_recving="waits")
    assert engine.step().computed == {"waits": (39, 40)}


class Left:
    """A request that has finished."""

    request_id = "left"
    status = RequestStatus.FINISHED_ABORTED

    def is_finished(self) -> bool:
        return True


class Looks(transfers.AwaitsTransfers):
    """A scheduler with one such request, which is received and sent."""

    _connector_finished = transfers.looks_who_loads(lambda self, request: (True, request))

    def __init__(self, connector: object) -> None:
        request: Any = Left()
        self.requests, self.connector = {"left": request}, connector
        assert self._connector_finished(request) == (True, request)
        self._keeps_blocks(request, receiving=True, sending=True)

    def awaits_both(self) -> bool:
        sent = KVConnectorOutput(finished_sending={"left"})
        return not self._ends_transfers(sent).finished_sending


V1 = "vllm.distributed.kv_transfer.kv_connector.v1."


def of(*modules: str) -> Any:  # noqa: ANN401 - a connector of any kind
    """A connector whose class, and the classes below it, are of these modules."""
    kind: type = object
    for module in reversed(modules):
        kind = type("Connector", (kind,), {"__module__": module})
    return kind()


def several(*connectors: object, loads: int | None = None) -> MultiConnector:
    """A `MultiConnector`; which of its connectors loads the request, if one does."""
    made = object.__new__(MultiConnector)
    vars(made).update(_connectors=list(connectors), _requests_to_connector={})
    if loads is not None:
        made._requests_to_connector["left"] = loads
    return made


OURS, THEIRS = of(V1 + "nixl.connector", V1 + "base"), of("in.house", V1 + "base")


@pytest.mark.parametrize(
    ("connector", "both"),
    [
        (None, False),
        (OURS, True),
        (of("in.house", V1 + "nixl.connector", V1 + "base"), True),
        (THEIRS, False),
        (of(V1 + "offloading_connector", V1 + "base"), True),
        (of("in.house", V1 + "offloading_connector", V1 + "base"), False),
        (of("in.house", V1 + "nixl_connector", V1 + "base"), True),
        (of(V1 + "lmcache_connector", V1 + "base"), False),
        (of(V1 + "flexkv_connector", V1 + "base"), False),
        (of("in.house"), False),
        (several(OURS, OURS), True),
        (several(OURS, THEIRS), False),
        (several(THEIRS, OURS, loads=1), True),
        (several(OURS, THEIRS, loads=1), False),
        (several(several(OURS, THEIRS), OURS), False),
    ],
)
def test_both_ends_are_awaited_where_who_loads_reports_both(connector: object, both: bool) -> None:
    assert Looks(connector).awaits_both() is both

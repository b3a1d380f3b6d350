"""Which reports of transfers a scheduler acts on: each transfer of a request that ended, once."""

from __future__ import annotations

import itertools
import logging

import pytest
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from tests.support.decode_engine import DecodeEngine
from tests.support.nixl_worker import connect
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


def test_a_request_that_waits_is_scheduled_when_it_is_received(engine: DecodeEngine) -> None:
    engine.ask("waits", range(40), [[5, 6, 7]])
    engine.step()
    report(engine, finished_sending="waits")
    assert engine.step().computed == {}
    report(engine, finished_recving="waits")
    assert engine.step().computed == {"waits": (39, 40)}

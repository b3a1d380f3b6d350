"""Which reports are left out, and what the next one says of it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.nixl_worker import await_handshakes, make_worker, receive, script_handshake
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.failed_handshakes import is_reported
from vllm_overlay.logging_utils import bounded_log
from vllm_overlay.logging_utils.bounded_log import LINES, PERIOD


class Worker:
    """Keeps what it is told to report."""

    def __init__(self) -> None:
        self.reported: list[tuple[Any, ...]] = []

    def report(self, failure_type: str, **context: object) -> None:
        if is_reported(self, failure_type, context):
            self.reported.append((failure_type, context))


@pytest.mark.parametrize("kind", ["handshake_failed", "handshake_setup_failed"])
def test_ten_of_a_kind_are_reported_and_the_next_minute_says_how_many_were_not(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = type("Clock", (), {"now": 1000.0, "monotonic": lambda self: self.now})()
    monkeypatch.setattr(bounded_log, "time", clock)
    worker = Worker()
    for n in range(100):
        worker.report(kind, req_id=n)
    assert worker.reported == [(kind, {"req_id": n}) for n in range(LINES)]
    clock.now += PERIOD
    worker.report(kind, req_id=100)
    assert worker.reported[LINES:] == [(kind, {"req_id": 100, "left_out_before": 100 - LINES})]


def test_all_other_failures_are_reported_as_they_come() -> None:
    worker = Worker()
    for _ in range(100):
        worker.report("transfer_failed", msg="of a read")
    assert worker.reported == 100 * [("transfer_failed", {"msg": "of a read"})]


def test_kinds_and_workers_do_not_take_each_others_lines() -> None:
    one, other = Worker(), Worker()
    for _ in range(2 * LINES):
        one.report("handshake_failed")
    one.report("handshake_setup_failed")
    other.report("handshake_failed")
    assert one.reported[LINES:] == [("handshake_setup_failed", {})]
    assert other.reported == [("handshake_failed", {})]


def test_a_report_names_the_line_that_made_it(caplog: pytest.LogCaptureFixture) -> None:
    def nobody(engine_id: str, _: int) -> dict[object, str]:
        raise ConnectionRefusedError(f"{engine_id} is not there")

    worker = make_worker()
    script_handshake(worker, nobody)
    receive(worker, "asked", engine_id="gone")
    await_handshakes(worker)
    found = [record.filename for record in caplog.records if "NIXL tr" in record.getMessage()]
    assert len(found) == 2
    assert "failed_handshakes.py" not in found

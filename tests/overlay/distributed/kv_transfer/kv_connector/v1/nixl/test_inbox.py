"""Notifications that cannot be read cost a line in the log and a count, and nobody else's."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.support.nixl_worker import make_worker, nixl_of, raising
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl import inbox
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.inbox import notifications
from vllm_overlay.logging_utils.bounded_log import LINES, BoundedLog


def failed(worker: Any) -> int:  # noqa: ANN401 - the worker
    stats = worker.get_kv_connector_stats()
    return sum(stats.data["num_failed_notifications"]) if stats is not None else 0


def test_what_can_be_read_is_handed_on_peer_by_peer() -> None:
    worker = make_worker()
    nixl_of(worker).inbox = {"P/0": [b"a:1", b"b:c:2"], "P/1": [b"a:16"]}
    assert list(notifications(worker)) == [[b"a:1", b"b:c:2"], [b"a:16"]]
    assert list(notifications(worker)) == []
    assert failed(worker) == 0


def test_who_was_heard_is_kept_for_a_report_and_only_where_one_is_made() -> None:
    worker = make_worker()
    for reported in (False, True):
        if reported:
            vars(worker)["_heard"] = {}
        nixl_of(worker).inbox = {"P/0": [b"a:1"]}
        assert list(notifications(worker)) == [[b"a:1"]]
        assert vars(worker).get("_heard") == ({"a": {"P/0"}} if reported else None)


@pytest.mark.parametrize(
    "lie", [b"", b"no number", b"a:", b"a:x", b"a:0", b"a:-1", b"\xff:1", b"a:1.0"]
)
def test_what_cannot_be_read_is_left_out(lie: bytes, caplog: pytest.LogCaptureFixture) -> None:
    worker = make_worker()
    nixl_of(worker).inbox = {"P/0": [b"a:1", lie, b"b:1"]}
    assert list(notifications(worker)) == [[b"a:1", b"b:1"]]
    assert failed(worker) == 1
    assert "notification_unreadable" in caplog.text and "P/0" in caplog.text


def test_a_peer_does_not_fill_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(inbox, "log", BoundedLog(logging.getLogger("inbox")))
    worker = make_worker()
    nixl_of(worker).inbox = {"P/0": [b"x" * 1000] * 3 * LINES}
    list(notifications(worker))
    lines = [line for line in caplog.messages if "notification_unreadable" in line]
    assert len(lines) == LINES
    assert max(map(len, lines)) < 400
    assert failed(worker) == 3 * LINES


def test_what_is_somebody_else_s_is_not_looked_at() -> None:
    worker = make_worker()
    vars(worker)["_heard"] = {}
    nixl_of(worker).inbox = {"P/0": [b"REG:\xff", b"\xff", b"a:1"]}
    assert list(notifications(worker, b"REG:")) == [[b"REG:\xff", b"a:1"]]
    assert vars(worker)["_heard"] == {}, "of pushes nothing is noted"


def test_ranks_that_do_not_fit() -> None:
    def fit(ranks: int) -> None:
        if ranks == 3:
            raise ValueError("3 and 2")

    worker = make_worker()
    nixl_of(worker).inbox = {"P/0": [b"a:3", b"a:2"]}
    assert list(notifications(worker, fit=fit)) == [[b"a:2"]]
    assert failed(worker) == 1


def test_a_heartbeat_is_one_where_the_release_has_them() -> None:
    worker = make_worker()
    nixl_of(worker).inbox = {"P/0": [b"HB:a,b"]}
    known = hasattr(worker, "_handle_heartbeat")  # from 0.22.0 on
    assert list(notifications(worker)) == [[b"HB:a,b"] * known]


def test_a_poll_that_fails_is_no_notification(caplog: pytest.LogCaptureFixture) -> None:
    worker = make_worker()
    nixl_of(worker).on["get_new_notifs"] = raising(RuntimeError("gone"))
    assert list(notifications(worker)) == []
    assert failed(worker) == 1
    assert "notification_poll_failed" in caplog.text

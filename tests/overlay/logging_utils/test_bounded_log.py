"""Lines that a client can cause: few, and none of them lost without a word."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest

from vllm_overlay.logging_utils import bounded_log
from vllm_overlay.logging_utils.bounded_log import LINES, PERIOD, BoundedLog


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    one = Clock()
    monkeypatch.setattr(bounded_log, "time", one)
    return one


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> BoundedLog:
    caplog.set_level(logging.WARNING)
    return BoundedLog(logging.getLogger("bounded"))


def test_ten_thousand_at_once_are_few_lines(
    clock: Clock, log: BoundedLog, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(10_000):
        log.warning("request %d is bad", number)
    assert caplog.messages == [f"request {number} is bad" for number in range(LINES)]
    clock.now += PERIOD
    log.warning("request %s is bad", "x")
    log.warning("request %s is bad", "y")
    left_out = 10_000 - LINES
    assert caplog.messages[LINES:] == [
        f"request x is bad ({left_out} more like it since the last of them that was logged.)",
        "request y is bad",
    ]


def test_what_comes_seldom_is_all_logged(
    clock: Clock, log: BoundedLog, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(100):
        log.warning("request %d is bad", number)
        clock.now += PERIOD / LINES
    assert caplog.messages == [f"request {number} is bad" for number in range(100)]


def test_kinds_do_not_take_each_others_lines(
    clock: Clock, log: BoundedLog, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2 * LINES):
        log.warning("bad")
    BoundedLog(logging.getLogger("bounded")).warning("other")
    assert caplog.messages.count("other") == 1


def test_from_many_threads_none_is_lost(
    clock: Clock, log: BoundedLog, caplog: pytest.LogCaptureFixture
) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(log.warning, ["bad"] * 1000))
    assert len(caplog.messages) == LINES
    clock.now += PERIOD
    log.warning("bad")
    assert f"({1000 - LINES} more like it" in caplog.messages[-1]


def test_a_line_names_the_place_and_the_error(
    clock: Clock, log: BoundedLog, caplog: pytest.LogCaptureFixture
) -> None:
    try:
        raise OSError("gone")
    except OSError:
        log.warning("bad", exc_info=True)
        assert "OSError: gone" in caplog.text
        log.warning("worse")
    record, without = caplog.records
    assert record.filename == "test_bounded_log.py"
    assert not without.exc_info

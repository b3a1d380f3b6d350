"""What a scheduler's statistics say of fixes, and what a server of another build makes of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
from vllm.v1.metrics.stats import SchedulerStats

from tests.support.decode_engine import DecodeEngine
from vllm_overlay.distributed.kv_transfer import fix_counts
from vllm_overlay.distributed.kv_transfer.fix_counts import Acted


def test_each_count_is_told_once() -> None:
    scheduler = DecodeEngine(log_stats=True).scheduler
    fix_counts.count(Acted.USED_TWICE)
    fix_counts.count(Acted.USED_TWICE)
    assert scheduler.make_stats().kv_transfer_fixes == {"USED_TWICE": 2}
    assert scheduler.make_stats().kv_transfer_fixes is None


def test_without_statistics_nothing_is_told_and_no_list_grows() -> None:
    scheduler = DecodeEngine().scheduler
    for _ in range(1000):
        fix_counts.count(Acted.USED_TWICE)
        assert scheduler.make_stats() is None
    assert fix_counts.taken() == {"USED_TWICE": 1000}


def test_a_server_that_does_not_know_the_counts_passes_over_them() -> None:
    """As stock's: a headless node and its server may be of different builds."""
    stock: Any = dataclasses.make_dataclass("StockStats", [("num_running_reqs", int)])
    told = SchedulerStats(num_running_reqs=3)
    told.kv_transfer_fixes = {"USED_TWICE": 2}
    heard = msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=stock)
    assert heard.num_running_reqs == 3


def test_statistics_of_a_stock_engine_tell_nothing() -> None:
    told = {"num_running_reqs": 3}
    heard = msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=SchedulerStats)
    assert heard.kv_transfer_fixes is None

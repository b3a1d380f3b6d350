"""From 0.21.0 on, transfers in both directions: what is promised, and who is told of what."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from tests.regressions.test_k25 import KEPT, PROMPT, is_answered, prefill
from tests.support.idle_engine import IdleEngine
from tests.support.nixl_worker import connect, nixl_of
from tests.support.two_way import TWO_WAY, second_turn, two_way

overlay = pytest.importorskip(TWO_WAY, reason="from 0.21.0 on")


def known(engine: IdleEngine) -> set[str]:
    """The requests that the worker would let go of."""
    return engine.worker._reqs_to_process


def test_a_second_turn_reads_what_is_kept_once() -> None:
    engine = prefill()
    engine.scheduler.max_num_scheduled_tokens = 2048
    nixl_of(engine.worker).finish(*nixl_of(engine.worker).in_flight())
    steps = [engine.step() for _ in range(3)]
    assert [step.computed["turn-2"] for step in steps if step.computed] == [(KEPT, len(PROMPT))]
    assert len(nixl_of(engine.worker).reads) == 1


def test_what_is_shorter_than_the_threshold_is_computed() -> None:
    engine = two_way(IdleEngine())
    vars(vars(engine.scheduler.connector)["connector_scheduler"])["kv_recompute_threshold"] = 64
    connect(engine.worker, "P")
    engine.send("turn-2", PROMPT, second_turn([[5, 6, 7]], KEPT), max_tokens=1)
    assert engine.step().computed == {"turn-2": (0, len(PROMPT))}


@pytest.mark.parametrize("both_ways", [False, True])
def test_a_worker_is_told_of_what_is_kept_and_of_nothing_else(
    both_ways: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_NIXL_ABORT_REQUEST_TIMEOUT", "0")  # in 0.21.0 D keeps it for so long
    engine = two_way(IdleEngine(), keeps=0.05)
    side: dict[str, Any] = vars(vars(engine.scheduler.connector)["connector_scheduler"])
    side["is_bidirectional_kv_xfer_enabled"] = both_ways
    engine.send("plain", PROMPT, None)
    engine.send("turn-1", PROMPT, {"session": "of a router"})
    engine.step()
    assert known(engine) == ({"turn-1"} if both_ways else set())
    engine.step()
    engine.step()
    time.sleep(0.1)
    engine.step()
    engine.step()
    assert known(engine) == set()
    assert engine.scheduler.requests == {}


def test_one_that_is_aborted_in_the_queue_is_forgotten() -> None:
    engine = two_way(IdleEngine())
    # From 0.32.0 on both bound what runs.
    vars(engine.scheduler).update(max_num_running_reqs=1, max_num_active_reqs=1)
    engine.send("long", PROMPT, None, max_tokens=50)
    engine.step()
    engine.send("turn-1", PROMPT, {"session": "of a router"})
    engine.step()
    engine.abort("turn-1")
    engine.step()
    engine.step()
    assert known(engine) == set()


def test_a_second_turn_whose_peer_is_gone_is_computed() -> None:
    engine = two_way(IdleEngine())
    engine.send("turn-2", PROMPT, second_turn([[5, 6, 7]], KEPT), max_tokens=1)
    assert is_answered(engine, 10.0)


MADE = {"block_size": 16, "is_bidirectional_kv_xfer_enabled": True, "use_host_buffer": False}


@pytest.mark.parametrize(
    ("params", "changes", "found", "kept"),
    [
        (None, {}, (7, True), False),
        ({}, {}, (7, True), False),
        ({"do_remote_prefill": True}, {}, (7, True), False),
        ({"session": "1"}, {}, (7, True), True),
        ({"session": "1"}, {"is_bidirectional_kv_xfer_enabled": False}, (7, True), False),
        ({"do_remote_decode": True}, {}, (7, True), False),
        ({"do_remote_decode": True, "_remote_blocks_processed": True}, {}, (0, False), False),
        ({"do_remote_decode": True}, {"use_host_buffer": True}, (0, False), False),
    ],
)
def test_what_upstream_promises_counts_while_it_will_be_read(
    params: dict[str, Any] | None, changes: dict[str, Any], found: tuple[int, bool], kept: bool
) -> None:
    batch: set[str] = set()
    part = SimpleNamespace(_reqs_in_batch=batch, **{**MADE, **changes})
    request = SimpleNamespace(request_id="r", kv_transfer_params=params)
    match = overlay.ends_second_turns(lambda *given: (7, given == (part, request, 3)))
    assert match(part, request, 3) == found
    assert batch == ({"r"} if kept else set())


def test_a_scheduler_that_no_constructor_made_is_left_alone() -> None:
    request = SimpleNamespace(request_id="r", kv_transfer_params={"do_remote_decode": True})
    match = overlay.ends_second_turns(lambda *given: (7, True))
    assert match(SimpleNamespace(), request, 0) == (7, True)

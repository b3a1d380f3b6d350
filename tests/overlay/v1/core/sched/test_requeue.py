"""A request that waits anew is the first of those that wait, and holds nothing."""

from __future__ import annotations

import pytest
from vllm.v1.request import RequestStatus

from tests.support.decode_engine import DecodeEngine
from tests.support.nixl_worker import connect, nixl_of

requeue = pytest.importorskip("vllm_overlay.v1.core.sched.requeue", reason="up to 0.30.0")


def received(*, arrived: bool) -> DecodeEngine:
    """An engine whose first request is received, or is told so in the next step; others wait."""
    engine = DecodeEngine()
    connect(engine.worker, "P")
    engine.ask("first", range(40), [[1, 2, 3]])
    engine.step()
    if arrived:
        nixl = nixl_of(engine.worker)
        nixl.finish(*nixl.in_flight())
        engine.scheduler.max_num_running_reqs = 0  # it has arrived, and does not run
        engine.step()
    engine.ask("second", range(500, 540))
    return engine


@pytest.mark.parametrize("arrived", [True, False])
def test_it_waits_in_front_without_blocks(arrived: bool) -> None:
    engine = received(arrived=arrived)
    scheduler = engine.scheduler
    request = scheduler.requests["first"]
    scheduler.finished_recving_kv_req_ids.add("first")
    assert not arrived or scheduler._try_promote_blocked_waiting_request(request)
    scheduler.skipped_waiting.remove_requests([request])
    getattr(scheduler, "_inflight_prefills", set()).add(request)  # from 0.23.0 on
    requeue.wait_as_preempted(scheduler, request)
    assert [waits.request_id for waits in scheduler.waiting] == ["first", "second"]
    assert engine.blocks_of("first") == set()
    assert request.num_computed_tokens == 0
    assert request.status == RequestStatus.WAITING
    assert request not in getattr(scheduler, "_inflight_prefills", ())


def test_it_is_computed_and_not_received_again() -> None:
    engine = received(arrived=True)
    scheduler = engine.scheduler
    request = scheduler.requests["first"]
    scheduler.skipped_waiting.remove_requests([request])
    requeue.wait_as_preempted(scheduler, request)
    scheduler.max_num_running_reqs = 2
    reads = len(nixl_of(engine.worker).reads)
    start, end = engine.step().computed["first"]
    assert (start, end) in [(0, 40), (32, 40)]  # what the prefix cache has of it stays
    assert len(nixl_of(engine.worker).reads) == reads

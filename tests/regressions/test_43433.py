"""43433: an engine that has nothing to do frees the blocks of requests that have finished.

The engine core's own loop runs in a thread, around a scheduler and a NIXL worker. No request comes
after those that a test names.
"""

from __future__ import annotations

import time

import pytest

from tests.support.idle_engine import IdleCore, IdleEngine
from tests.support.nixl_worker import connect, nixl_of


def prefill(engine: IdleEngine, req_id: str) -> None:
    """A request whose prompt is computed for a peer, and whose blocks are kept for it."""
    engine.send(req_id, range(40), {"do_remote_decode": True}, max_tokens=1)


def rests(idle: IdleCore) -> bool:
    """Whether the loop has taken the steps that its requests need."""
    scheduler = idle.engine.scheduler
    return idle.steps > 0 and not scheduler.has_unfinished_requests()


def test_p_frees_what_has_been_read() -> None:
    engine = IdleEngine()
    free = engine._reusable()
    with IdleCore(engine) as idle:
        idle.call(lambda: prefill(engine, "req-p"))
        idle.comes_to(lambda: rests(idle))
        time.sleep(0.1)
        nixl_of(engine.worker).inbox = {"D/0": [b"req-p:1"]}
        assert idle.comes_to(lambda: engine._reusable() == free), (
            "P keeps the blocks until a request comes"
        )


def test_p_frees_what_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_NIXL_ABORT_REQUEST_TIMEOUT", "1")  # up to 0.21.0
    engine = IdleEngine()
    engine.scheduler.connector.connector_scheduler._kv_lease_duration = 1  # later
    free = engine._reusable()
    with IdleCore(engine) as idle:
        idle.call(lambda: prefill(engine, "req-p"))
        assert idle.comes_to(lambda: engine._reusable() != free)
        assert idle.comes_to(lambda: engine._reusable() == free), "the lease has run out"


def test_d_frees_what_was_received_for_a_request_that_has_left() -> None:
    engine = IdleEngine()
    connect(engine.worker, "P")
    free = engine._reusable()

    def come_and_leave() -> None:
        engine.ask("left", range(40), [[5, 6, 7]])
        engine.step()
        engine.abort("left")

    with IdleCore(engine) as idle:
        idle.call(come_and_leave)
        idle.comes_to(lambda: rests(idle))
        time.sleep(0.1)
        nixl_of(engine.worker).finish(*nixl_of(engine.worker).in_flight())
        assert idle.comes_to(lambda: engine._reusable() == free)

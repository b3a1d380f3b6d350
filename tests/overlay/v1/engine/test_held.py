"""When an idle engine core looks for blocks that may be freed: while there are any, and rarely."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.core import DPEngineCoreProc, EngineCoreProc

from tests.support.idle_engine import IdleCore, IdleEngine, lie_down, wait_for
from tests.support.nixl_worker import nixl_of
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.connector import RARELY

held = pytest.importorskip("vllm_overlay.v1.engine.held", reason="up to 0.21.0")

LOOPS = [EngineCoreProc, DPEngineCoreProc]


def prefill(engine: IdleEngine, req_id: str = "req-p") -> None:
    """A request whose blocks are kept for a peer."""
    engine.send(req_id, range(40), {"do_remote_decode": True}, max_tokens=1)


@pytest.mark.parametrize("core_class", LOOPS)
def test_it_looks_rarely_and_rests_when_all_is_free(core_class: type[EngineCoreProc]) -> None:
    engine = IdleEngine()
    with IdleCore(engine, core_class) as idle:
        idle.call(lambda: prefill(engine))
        scheduler = engine.scheduler
        assert wait_for(lambda: scheduler.requests and not scheduler.has_unfinished_requests())
        served, since = idle.steps, time.monotonic()
        assert wait_for(lambda: idle.steps > served + 5, 30.0)
        assert idle.steps <= served + 1 + (time.monotonic() - since) / RARELY
        nixl_of(engine.worker).inbox = {"D/0": [b"req-p:1"]}
        assert wait_for(lambda: not engine.scheduler.requests, 1.0)
        before = idle.steps
        time.sleep(0.6)
        assert idle.steps <= before + 2
    assert idle.seconds < 0.5, "CPU seconds"


def test_who_asks_whether_the_engine_is_idle_is_told_so() -> None:
    engine, seen = IdleEngine(), []
    with IdleCore(engine) as idle:
        idle.call(lambda: prefill(engine))
        assert wait_for(lambda: idle.steps > 2)
        for _ in range(100):
            idle.call(lambda: seen.append(engine.scheduler.has_requests()))
            time.sleep(0.002)
    assert len(seen) == 100
    assert not any(seen)


@pytest.mark.parametrize("rest", ["paused", "asleep"])
def test_an_engine_that_is_paused_or_asleep_takes_no_step(rest: str) -> None:
    engine = IdleEngine()
    idle = IdleCore(engine)

    with idle:
        idle.call(lambda: prefill(engine))
        assert wait_for(lambda: idle.steps > 2)
        lie_down(idle, rest)
        time.sleep(0.3)
        before = idle.steps
        time.sleep(0.5)
        assert idle.steps == before


def test_a_connector_that_asks_for_no_looks_is_looked_at_all_the_same() -> None:
    """As LMCache's, which holds the blocks of what it saves."""
    engine = IdleEngine()
    connector = engine.scheduler.connector

    class Plain:
        """What the scheduler asks of a connector, and no more."""

        def __getattr__(self, name: str) -> Any:  # noqa: ANN401
            if name in ("looking", "looks", "next_look"):
                raise AttributeError(name)
            return getattr(connector, name)

    engine.scheduler.connector = Plain()
    with IdleCore(engine) as idle:
        idle.call(lambda: prefill(engine))
        assert wait_for(lambda: idle.steps > 3)
    assert idle.engine.scheduler.connector.looking is False


def test_open_sessions_are_not_held_blocks() -> None:
    """A request that waits for more of its client's input is in a queue."""
    scheduler = SimpleNamespace(
        get_kv_connector=lambda: object(), waiting=[], skipped_waiting=[1], running=[], requests={1}
    )
    core: Any = SimpleNamespace(scheduler=scheduler)
    assert not held.holds_blocks(core)
    scheduler.requests = {1, 2}
    assert held.holds_blocks(core)
    scheduler.get_kv_connector = lambda: None
    assert not held.holds_blocks(core)


def test_a_scheduler_that_is_not_of_vllm_may_have_other_queues() -> None:
    scheduler = SimpleNamespace(get_kv_connector=lambda: object(), waiting=[], requests={1})
    core: Any = SimpleNamespace(scheduler=scheduler)
    assert not held.holds_blocks(core)

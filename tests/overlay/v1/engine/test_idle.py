"""An idle engine core that still has something to say to a peer: soon, and without a busy loop."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from vllm.v1.engine.core import DPEngineCoreProc, EngineCoreProc

from tests.support.idle_engine import IdleCore, IdleEngine, lie_down, wait_for
from tests.support.nixl_worker import nixl_of, register_peer, script_handshake
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.connector import RARELY, WantsLooks
from vllm_overlay.v1.engine import idle as idle_module

LOOPS = [EngineCoreProc, DPEngineCoreProc]


def silent(engine: IdleEngine) -> threading.Event:
    """Let P never answer; set the event returned, and its handshake ends."""
    end = threading.Event()

    def hang(engine_id: str, tp_size: int) -> dict[Any, str]:
        end.wait(10)
        raise TimeoutError("no answer")

    script_handshake(engine.worker, hang)
    return end


def leave(engine: IdleEngine, req_id: str = "left", engine_id: str = "P") -> None:
    """A request that names P comes, and its client leaves before it is scheduled."""
    engine.ask(req_id, range(20), [[1, 2]], engine_id=engine_id)
    engine.abort(req_id)


@pytest.mark.parametrize("core_class", LOOPS)
def test_a_peer_that_does_not_answer_costs_no_busy_loop(core_class: type[EngineCoreProc]) -> None:
    engine = IdleEngine()
    end = silent(engine)
    idle = IdleCore(engine, core_class)
    with idle:
        idle.call(lambda: leave(engine))
        time.sleep(2.0)
        end.set()
    assert idle.steps < 25
    assert idle.seconds < 0.3, "CPU seconds in two seconds of waiting"


@pytest.mark.parametrize("core_class", LOOPS)
@pytest.mark.parametrize("seconds", [0.0, 0.02, 0.3])
def test_a_peer_hears_soon_after_it_has_answered(
    core_class: type[EngineCoreProc], seconds: float
) -> None:
    """Late by as long again as it has taken to answer, on an engine with nothing else to do."""
    engine, answered = IdleEngine(), []

    def shake_hands(engine_id: str, tp_size: int) -> dict[Any, str]:
        time.sleep(seconds)
        answered.append(time.monotonic())
        return register_peer(engine.worker, engine_id, tp_size)

    script_handshake(engine.worker, shake_hands)
    with IdleCore(engine, core_class) as idle:
        idle.call(lambda: leave(engine))
        assert wait_for(lambda: nixl_of(engine.worker).heard)
        heard = time.monotonic()
        assert nixl_of(engine.worker).heard == {"P/0": [b"left-at-p:1"]}
        assert heard - answered[-1] < 0.1 + seconds
        before = idle.steps
        time.sleep(0.6)
        assert idle.steps <= before + 2, "and then it rests"


def test_a_rank_with_nothing_to_do_tells_while_others_have() -> None:
    """It does not wait for requests then, but runs the model for nothing, along with the others."""
    engine, of_nothing = IdleEngine(), mock.Mock(side_effect=lambda: time.sleep(0.01))
    script_handshake(engine.worker, lambda peer, ranks: register_peer(engine.worker, peer, ranks))
    idle = IdleCore(engine, DPEngineCoreProc)
    vars(idle.core).update(
        engines_running=True,
        enable_fault_tolerance=False,
        _has_global_unfinished_reqs=lambda _: True,
        capture_iteration_details=nullcontext,
        log_iteration_details=nullcontext,  # as earlier releases call it
        execute_dummy_batch=of_nothing,
    )
    with idle:
        idle.call(lambda: leave(engine))
        assert wait_for(lambda: nixl_of(engine.worker).heard)
        before = idle.steps
        time.sleep(0.3)
        assert idle.steps <= before + 2, "and then it looks no more"
        assert of_nothing.called
    assert nixl_of(engine.worker).heard == {"P/0": [b"left-at-p:1"]}


class Looked(WantsLooks):
    """A connector that wants one look."""

    def __init__(self, at: float | None) -> None:
        self.at = at

    def next_look(self) -> float | None:
        return self.at

    def looks(self) -> None:
        self.at = None


class Waits:
    """An engine core whose time is `NOW`, and goes on while it waits for a request until a time.

    Attributes:
        waits: for how many seconds it has waited; a wait without an end is ended by a request.
        steps: whether the connector was looking in each.
    """

    has_work = is_scheduler_paused = staticmethod(lambda: False)

    def __init__(self, connector: object, *, has_requests: bool = False) -> None:
        self.now, self.connector = NOW, connector
        self.scheduler = SimpleNamespace(
            get_kv_connector=lambda: connector, has_requests=lambda: has_requests
        )
        self.model_executor = SimpleNamespace(is_sleeping=False)
        self.input_queue = self
        self.waits: list[float | str] = []
        self.steps: list[bool] = []

    def get(self, block: bool = True, timeout: float | None = None) -> str:
        if timeout is None:
            self.waits.append("blocks" if block else "asks")
            return "a request"
        self.waits.append(timeout)
        self.now += timeout
        raise queue.Empty

    def _process_engine_step(self) -> bool:
        self.steps.append(getattr(self.connector, "looking", False))
        return self.steps[-1]


NOW = 100.0


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    def make(*args: object, **named: bool) -> Waits:
        core = Waits(*args, **named)
        monkeypatch.setattr(idle_module, "time", SimpleNamespace(monotonic=lambda: core.now))
        return core

    return make


@pytest.mark.parametrize(
    ("at", "has_requests", "looks"),
    [
        (NOW - 1, False, True),
        (NOW, False, True),
        (NOW + 60, False, False),
        (None, False, False),
        (NOW - 1, True, False),
    ],
)
def test_a_rank_takes_its_own_step_until_it_is_time_to_look(
    waits: Callable[..., Any], at: float | None, has_requests: bool, looks: bool
) -> None:
    core = waits(connector := Looked(at), has_requests=has_requests)
    assert idle_module.step_or_look(core) is looks
    assert core.steps == [looks]
    assert not connector.looking


def test_what_is_awaited_besides_is_looked_for_rarely(waits: Callable[..., Any]) -> None:
    """Also with a connector that wants no looks."""
    core, left = waits(SimpleNamespace()), [True, True, False]
    assert idle_module.next_request(core, True, lambda _: left.pop(0)) == "a request"
    assert core.waits == [RARELY, RARELY, "blocks"]
    assert core.steps == [True, True]


@pytest.mark.parametrize(
    ("at", "wait"), [(NOW - 1, 0), (NOW + 0.125, 0.125), (NOW + 1, RARELY), (None, RARELY)]
)
def test_the_first_look_that_is_wanted_is_taken(
    waits: Callable[..., Any], at: float | None, wait: float
) -> None:
    core = waits(Looked(at))
    core.has_work = lambda: True  # then there is no time for another one
    with pytest.raises(queue.Empty):
        idle_module.next_request(core, True, lambda _: True)
    assert core.waits == [wait]


def test_who_is_not_to_wait_asks_once(waits: Callable[..., Any]) -> None:
    core = waits(Looked(NOW))
    assert idle_module.next_request(core, False) == "a request"
    assert (core.waits, core.steps) == (["asks"], [])


def test_who_asks_whether_the_engine_is_idle_is_told_so() -> None:
    """What waits for an idle engine (a pause, a shutdown, a release of memory) does not wait for a
    peer: the step that looks is the core's alone, as if no request had ever come."""
    engine = IdleEngine()
    end = silent(engine)
    idle, seen = IdleCore(engine), []
    with idle:
        idle.call(lambda: leave(engine))
        assert wait_for(lambda: idle.steps > 0 and not engine.scheduler.has_requests())
        for _ in range(200):
            idle.call(lambda: seen.append(engine.scheduler.has_requests()))
            time.sleep(0.002)
        end.set()
    assert len(seen) == 200
    assert not any(seen)


@pytest.mark.parametrize("rest", ["paused", "asleep"])
def test_an_engine_that_is_paused_or_asleep_takes_no_step(rest: str) -> None:
    """Its peer is told when it is awake again, and has something to do."""
    engine = IdleEngine()
    end = silent(engine)
    idle = IdleCore(engine)

    with idle:
        idle.call(lambda: leave(engine))
        time.sleep(0.1)
        lie_down(idle, rest)
        time.sleep(0.1)
        before = idle.steps
        time.sleep(0.5)
        assert idle.steps == before
        end.set()


def test_an_engine_without_a_connector_waits_as_ever() -> None:
    core: Any = EngineCoreProc.__new__(EngineCoreProc)
    waits = mock.Mock(get=mock.Mock(side_effect=[("request",)]), empty=lambda: True)
    vars(core).update(
        scheduler=SimpleNamespace(
            has_requests=lambda: False, get_kv_connector=lambda: None, connector=None
        ),
        input_queue=waits,
        aborts_queue=SimpleNamespace(mutex=threading.Lock(), queue=[]),
        process_input_queue_block=True,
        engines_running=False,
        batch_queue=None,
        _idle_state_callbacks=[],
        is_running=mock.Mock(side_effect=[True, False]),
        _handle_client_request=lambda *_: None,
    )
    core._process_input_queue()
    waits.get.assert_called_once_with(block=True)

"""54581: a pause that cannot clear the caches fails, and the engine goes on.

The engine core's own loop runs in a thread, around a scheduler and a NIXL worker. It is paused as
its API server does it, while a step runs: then the pause ends once the loop has nothing to do.
What holds blocks at that time is a transfer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
from vllm.config import ParallelConfig
from vllm.v1.engine import EngineCoreRequestType, UtilityOutput
from vllm.v1.engine.core import DPEngineCoreProc, EngineCoreProc

from tests.support.idle_engine import IdleCore, IdleEngine
from tests.support.nixl_worker import connect, nixl_of
from tests.support.release import since

LOOPS = [EngineCoreProc, DPEngineCoreProc]

P_MODES = ["keep", "wait", "abort"]
D_MODES = ["keep", "wait", "abort"]
if since("0.22.0"):  # a pause waits for the transfers of finished requests
    P_MODES, D_MODES = [], ["keep", "wait"]
if since("0.32.0"):  # "wait" waits for those of waiting ones too
    D_MODES = ["keep"]

CALLS = [(side, mode) for side, modes in (("P", P_MODES), ("D", D_MODES)) for mode in modes]


class Engine(IdleEngine):
    """Does `when_last` at the end of the step in which the request "last" ends.

    Attributes:
        ended: the requests that have ended.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ended: set[str] = set()
        self.when_last: Callable[[], None] = lambda: None
        connect(self.worker, "P")

    def step(self) -> Any:  # noqa: ANN401 - of `IdleEngine`
        step = super().step()
        self.ended |= step.finished.keys()
        if "last" in step.finished:
            self.when_last()
        return step

    def hold(self, side: str) -> None:
        """Serve "last", and have a transfer hold blocks after that."""
        if side == "P":
            self.send("last", range(40), {"do_remote_decode": True}, max_tokens=1)
        else:
            self.ask("received", range(40), [[5, 6, 7]])
            self.send("last", range(40, 80), None)

    def end_transfer(self, side: str) -> None:
        """The peer has read, or has sent."""
        if side == "P":
            nixl_of(self.worker).inbox = {"D/0": [b"last:1"]}
        else:
            nixl_of(self.worker).finish(*nixl_of(self.worker).in_flight())


class Core(IdleCore):
    """An engine core that an API server may call, one rank of data parallelism or all there is."""

    def __init__(self, engine: IdleEngine, core_class: type[EngineCoreProc]) -> None:
        super().__init__(engine, core_class)
        self._ids = itertools.count()
        self._answers: dict[int, UtilityOutput] = {}
        vars(self.core).update(
            model_executor=mock.Mock(is_sleeping=False),
            mm_receiver_cache=None,
            vllm_config=engine.worker.vllm_config,
            has_coordinator=False,
            dp_rank=0,
            dp_group=None,
            dp_sync_interval=32,  # from 0.30.0 on
            step_counter=0,
            current_wave=0,
            pending_pause=False,
            ignore_start_dp_wave=False,
            enable_fault_tolerance=False,  # from 0.27.0 on
            execute_dummy_batch=lambda: None,
            capture_iteration_details=lambda _: nullcontext(),
        )

    def __enter__(self) -> Core:
        super().__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        try:
            super().__exit__(*raised)
        except RuntimeError:
            if not any(raised):  # else the test has said already that the engine has died
                raise

    def ask(self, name: str, *args: object) -> int:
        """Send the loop a call of its method `name`; return the call's id."""
        call = next(self._ids)
        request = (0, call, name, args)
        handle = type(self.core)._handle_client_request
        self.call(lambda: handle(self.core, EngineCoreRequestType.UTILITY, request))
        return call

    def answer(self, call: int) -> UtilityOutput | None:
        """What came back for `call`; None if the engine has nothing more to say."""
        self.comes_to(lambda: self._has(call) or not self._thread.is_alive())
        return self._answers.get(call)

    def _has(self, call: int) -> bool:
        while not self.core.output_queue.empty():
            _, outputs = self.core.output_queue.get_nowait()
            if (said := outputs.utility_output) is not None:
                self._answers[said.call_id] = said
        return call in self._answers


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """All other ranks of data parallelism have nothing to do, and are paused at the same time."""
    monkeypatch.setattr(ParallelConfig, "has_unfinished_dp", lambda *args: args[-1])
    monkeypatch.setattr(
        ParallelConfig,
        "sync_dp_state",  # from 0.21.0 on
        lambda *_, has_unfinished, pending_pause: (has_unfinished, pending_pause),
        raising=False,
    )


def outlives(side: str, core_class: type[EngineCoreProc], name: str, *args: object) -> None:
    """Call `name` while the step runs after which only a transfer holds blocks."""
    engine = Engine()
    calls: list[int] = []
    with Core(engine, core_class) as idle:
        engine.when_last = lambda: calls.append(idle.ask(name, *args))
        idle.call(lambda: engine.hold(side))
        idle.comes_to(lambda: calls)
        failed = idle.answer(calls[0])
        assert failed is not None, "the engine has died, and who asked has no answer"
        assert failed.failure_message is not None, "who asked is told that all went well"
        assert not idle.core.model_executor.sleep.called

        idle.call(lambda: engine.end_transfer(side))
        resumed = idle.answer(idle.ask("resume_scheduler"))
        assert resumed is not None
        assert resumed.failure_message is None
        idle.call(lambda: engine.send("next", range(80, 120), None))
        assert idle.comes_to(lambda: "next" in engine.ended), "the next request has no answer"

        again = idle.answer(idle.ask(name, *args))
        assert again is not None
        assert again.failure_message is None, "nothing holds blocks any more"


@pytest.mark.parametrize("core_class", LOOPS)
@pytest.mark.parametrize(("side", "mode"), CALLS)
def test_a_pause_that_fails_is_told(side: str, mode: str, core_class: type[EngineCoreProc]) -> None:
    outlives(side, core_class, "pause_scheduler", mode)


@pytest.mark.parametrize("core_class", LOOPS)
def test_an_engine_that_cannot_be_put_to_sleep_stays_awake(
    core_class: type[EngineCoreProc],
) -> None:
    outlives("D", core_class, "sleep", 1, "keep")

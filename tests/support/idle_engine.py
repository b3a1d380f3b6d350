"""A decode engine that stops stepping when it has nothing to do, as the engine core does.

`DecodeEngine` with what lies between it and an API server: the NIXL connector's own facade, the
engine core's `add_request`, and its rule for when to take another step.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore, EngineCoreProc, EngineShutdownState
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from tests.support.decode_engine import DecodeEngine, finished, sent
from tests.support.harness import HarnessError, building
from tests.support.nixl_release import connector_module


class IdleEngine(DecodeEngine):
    """Steps only while its scheduler has work.

    Attributes:
        connector: the worker's NIXL connector, around `worker`.
    """

    @building("an engine that rests")
    def __init__(self, **config: Any) -> None:  # noqa: ANN401 - handed on
        super().__init__(**config)
        worker_class = self.worker.__class__.__name__
        with mock.patch.object(connector_module, worker_class, lambda *_: self.worker):
            self.connector = connector_module.NixlConnector(
                self.worker.vllm_config, KVConnectorRole.WORKER, self.worker.kv_cache_config
            )

    def add(self, request: EngineCoreRequest) -> None:
        """Take a request from an API server, as the engine core does."""
        core: Any = SimpleNamespace(scheduler=self.scheduler)
        core.abort_requests = lambda ids: EngineCore.abort_requests(core, ids)
        EngineCore.add_request(core, Request.from_engine_core_request(request, self._hasher))

    def abort(self, req_id: str) -> None:
        """A client leaves."""
        self.scheduler.finish_requests(req_id, RequestStatus.FINISHED_ABORTED)

    def run(self, seconds: float = 5.0) -> bool:
        """Step until there is nothing to do, at most for `seconds`.

        Returns:
            Whether the engine is idle.
        """
        end = time.monotonic() + seconds
        while self.scheduler.has_requests() and time.monotonic() < end:
            self.step()
        return not self.scheduler.has_requests()

    def _start(self, decided: SchedulerOutput) -> None:
        self.connector.bind_connector_metadata(sent(decided.kv_connector_metadata))
        context: Any = None  # NIXL does not look at the forward pass
        self.connector.start_load_kv(context)

    def _report(self) -> KVConnectorOutput:
        return KVConnectorOutput(
            **finished(self.connector, set()),
            invalid_block_ids=self.connector.get_block_ids_with_load_errors(),
            kv_connector_stats=self.connector.get_kv_connector_stats(),
            kv_connector_worker_meta=self.connector.build_connector_worker_meta(),
        )


class _Requests(queue.Queue[Any]):
    """An engine core's input queue that can tell whether its loop waits for the next request."""

    def __init__(self) -> None:
        super().__init__()
        self._without_end = False

    def get(self, block: bool = True, timeout: float | None = None) -> Any:  # noqa: ANN401
        self._without_end = block and timeout is None
        try:
            item = super().get(block, timeout)
        finally:
            self._without_end = False
        self.task_done()
        return item

    @property
    def is_all(self) -> bool:
        """Whether the loop waits for the next request, without an end, and there is none."""
        return self._without_end and self.unfinished_tasks == 0


class IdleCore:
    """vLLM's own engine core loop around an `IdleEngine`, in a thread; a context manager.

    Attributes:
        engine: what the loop steps. Only the loop touches it while it runs; `call` gets there.
        steps: how many steps were taken.
        seconds: CPU time that the loop has used, once it has ended.
    """

    def __init__(
        self, engine: IdleEngine, core_class: type[EngineCoreProc] = EngineCoreProc
    ) -> None:
        self.engine = engine
        self.steps = 0
        self.seconds = 0.0
        self.core: Any = object.__new__(core_class)  # its constructor starts a model
        vars(self.core).update(
            scheduler=engine.scheduler,
            model_executor=SimpleNamespace(is_sleeping=False),
            input_queue=_Requests(),
            aborts_queue=queue.Queue(),
            output_queue=queue.Queue(),
            process_input_queue_block=True,
            shutdown_state=EngineShutdownState.RUNNING,
            engines_running=False,
            batch_queue=None,
            _idle_state_callbacks=[],
            publish_dp_lb_stats=False,
            eep_scaling_state=None,
            step_fn=self._step,
            post_step=lambda _: None,
            _handle_client_request=lambda act, *_: act(),
            _handle_shutdown=lambda: self.core.is_running(),
        )
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> IdleCore:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.call(lambda: setattr(self.core, "shutdown_state", EngineShutdownState.REQUESTED))
        self._thread.join(10)
        if self._thread.is_alive():
            raise HarnessError("the engine's loop goes on after 10 s", "its end, as asked")
        if self._failed is not None:
            raise self._failed

    def call(self, act: Callable[[], Any]) -> None:
        """Have the loop do `act` as it takes requests: when it is idle or between two steps."""
        self.core.input_queue.put_nowait((act, None))

    def comes_to(self, what: Callable[[], object], seconds: float = 5.0) -> bool:
        """Whether `what`, which only the loop can bring about, comes to hold within `seconds`.

        Where the loop waits for a request, and for nothing else, there is nothing to wait for.
        """
        end = time.monotonic() + seconds
        over = False
        while not (holds := bool(what())) and not over:
            over = time.monotonic() > end or self.core.input_queue.is_all
            time.sleep(0 if over else 0.01)
        return holds

    def _step(self) -> tuple[dict[int, Any], bool]:
        if self.engine.scheduler.has_requests():
            self.steps += 1
            self.engine.step()
        return {}, False

    def _run(self) -> None:
        began = time.thread_time()
        try:
            self.core.run_busy_loop()
        except SystemExit:
            pass
        except BaseException as error:
            self._failed = error
        self.seconds = time.thread_time() - began


def wait_for(
    what: Callable[[], Any], seconds: float = 5.0, now: Callable[[], float] = time.monotonic
) -> bool:
    """Whether `what` comes to hold within `seconds`, as `now` counts them."""
    end = now() + seconds
    while not what() and now() < end:
        time.sleep(0.001)
    return bool(what()) and now() < end


def lie_down(idle: IdleCore, rest: str) -> None:
    """Have the engine core be paused, or put to sleep: `rest` is "paused" or "asleep"."""
    if rest == "paused":
        idle.call(lambda: setattr(idle.core, "is_scheduler_paused", lambda: True))
    else:
        idle.call(lambda: setattr(idle.core.model_executor, "is_sleeping", True))

"""A decode engine that stops stepping when it has nothing to do, as the engine core does.

`DecodeEngine` with what lies between it and an API server: the NIXL connector's own facade, the
engine core's `add_request`, and its rule for when to take another step.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from tests.decode_engine import DecodeEngine, finished
from tests.nixl_release import connector_module


class IdleEngine(DecodeEngine):
    """Steps only while its scheduler has work.

    Attributes:
        connector: the worker's NIXL connector, around `worker`.
    """

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
        self.connector.bind_connector_metadata(decided.kv_connector_metadata)
        context: Any = None  # NIXL does not look at the forward pass
        self.connector.start_load_kv(context)

    def _report(self) -> KVConnectorOutput:
        return KVConnectorOutput(
            **finished(self.connector, set()),
            invalid_block_ids=self.connector.get_block_ids_with_load_errors(),
            kv_connector_stats=self.connector.get_kv_connector_stats(),
            kv_connector_worker_meta=self.connector.build_connector_worker_meta(),
        )

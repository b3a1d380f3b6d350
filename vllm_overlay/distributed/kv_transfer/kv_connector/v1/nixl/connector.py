# SPDX-License-Identifier: Apache-2.0
"""An idle decode engine sends what it still has to say to a prefill server.

A request that ends without reading its blocks (rejected, or aborted in the queue) leaves one
thing to do: a notification. The worker sends it at once if it knows the prefill server; else it
shakes hands first, in a thread, and sends it in the next step of the engine. An engine without
requests takes no further step. So the worker says when a notification waits for a handshake, and
the scheduler counts that as work until the worker says that none does any more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

if TYPE_CHECKING:
    from concurrent.futures import Future

    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
        NixlConnectorMetadata,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.worker import NixlConnectorWorker
    from vllm.v1.outputs import KVConnectorOutput


def _nothing() -> None:
    pass


class NeedsTick:
    """A connector that can ask for another step of an engine that has nothing else to do."""

    needs_tick: bool = False


class NotificationsWait(KVConnectorWorkerMetadata):
    """A worker's report: does a notification wait for a handshake? True wins over ranks."""

    def __init__(self, waiting: bool) -> None:
        self.waiting = waiting

    def aggregate(self, other: KVConnectorWorkerMetadata) -> NotificationsWait:
        """Join the reports of two ranks."""
        waiting = isinstance(other, NotificationsWait) and other.waiting
        return NotificationsWait(self.waiting or waiting)


class WakesIdleEngine(NeedsTick):
    """A base for `NixlConnector`, which is built once for the scheduler and once per worker."""

    connector_worker: NixlConnectorWorker | None

    _settled: Future[None] | None = None  # done once every handshake before it is
    _reported = False

    # Worker side.

    def watch_notifications(self, metadata: NixlConnectorMetadata) -> None:
        """Look for receives without blocks, which only notify, among those just started."""
        worker = self.connector_worker
        if worker is None:
            return
        if any(not receive.local_block_ids for receive in metadata.reqs_to_recv.values()):
            # One thread shakes all hands, and runs the callbacks that queue what may go on.
            # Whatever this task finds before it is over by then.
            self._settled = worker._handshake_initiation_executor.submit(_nothing)

    def build_connector_worker_meta(self) -> NotificationsWait | None:
        """Report in each step while notifications wait, and once that they no longer do."""
        waiting = self._notifications_wait()
        if not waiting:
            self._settled = None
        report = NotificationsWait(waiting) if waiting or self._reported else None
        self._reported = waiting
        return report

    def _notifications_wait(self) -> bool:
        if self._settled is None or self.connector_worker is None:
            return False
        # The thread queues before it settles, so this order of looking misses nothing.
        return not self._settled.done() or not self.connector_worker._ready_requests.empty()

    # Scheduler side.

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take the workers' report; no report is no news."""
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, NotificationsWait):
            self.needs_tick = report.waiting


def needs_tick(connector: Any) -> bool:  # noqa: ANN401 - any release's connector base
    """Whether `connector` asks for another step."""
    return isinstance(connector, NeedsTick) and connector.needs_tick

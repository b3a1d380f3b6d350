# SPDX-License-Identifier: Apache-2.0
"""All releases: an idle decode engine sends what it still has to say to a prefill server.

A request that ends without reading its blocks (rejected, or aborted in the queue) leaves one
thing to do: a notification. The worker sends it at once if it knows the prefill server; else it
shakes hands first, in threads, and sends it in a later step of the engine. An engine without
requests takes no further step. So the worker says what notifications have before them, and the
scheduler's side says when to look at them: soon after there is news, and then rarer and rarer. What
looks is the engine core's loop, see `vllm_overlay.v1.engine.idle`.

It is not sent from the thread that shakes hands, though no step would be needed then: NIXL's
agents are made without locks (`NIXL_THREAD_SYNC_NONE`), and vLLM sends from its main thread only.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.notifications import (
    pending_notifications,
)

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.worker import NixlConnectorWorker
    from vllm.v1.outputs import KVConnectorOutput

SOON = 0.002
"""Seconds from news of a notification to the first look at it. Each further look comes after twice
the time, so one is late by as long again as its peer has taken, at most."""

RARELY = 0.25
"""Seconds between looks at the most; a look is an engine step without tokens."""


class WantsLooks:
    """A connector that can ask for steps of an engine that has nothing else to do.

    Attributes:
        looking: the engine core is about to take such a step, and only then.
    """

    looking: bool = False

    def next_look(self) -> float | None:
        """When (`time.monotonic`) to take the next step; None if there is nothing to look at."""
        raise NotImplementedError

    def looks(self) -> None:
        """Hear that a step is taken, and so make the next one wait."""
        raise NotImplementedError


class NotificationsWait(KVConnectorWorkerMetadata):
    """A worker's report: what its notifications have before them; over ranks, the sum."""

    def __init__(self, pending: int) -> None:
        self.pending = pending

    def aggregate(self, other: KVConnectorWorkerMetadata) -> NotificationsWait:
        """Join the reports of two ranks."""
        others = other.pending if isinstance(other, NotificationsWait) else 0
        return NotificationsWait(self.pending + others)


class WakesIdleEngine(WantsLooks):
    """A base for `NixlConnector`, which is built once for the scheduler and once per worker."""

    connector_worker: NixlConnectorWorker | None

    _pending = 0
    _pause = SOON
    _look_at: float | None = None

    # Worker side.

    def build_connector_worker_meta(self) -> NotificationsWait | None:
        """Report in each step while notifications wait, and once that they no longer do."""
        worker = self.connector_worker
        pending = 0 if worker is None else pending_notifications(worker)
        report = NotificationsWait(pending) if pending or self._pending else None
        self._pending = pending
        return report

    # Scheduler side.

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take the workers' report; no report is no news."""
        report = connector_output.kv_connector_worker_meta
        if not isinstance(report, NotificationsWait):
            return
        if not report.pending:
            self._look_at = None
        elif report.pending != self._pending:
            self._pause = SOON
            self._look_at = time.monotonic() + SOON
        self._pending = report.pending

    def next_look(self) -> float | None:
        """When (`time.monotonic`) to take the next step; None if there is nothing to look at."""
        return self._look_at

    def looks(self) -> None:
        """Hear that a step is taken, and so make the next one wait."""
        if self._look_at is not None:
            self._pause = min(2 * self._pause, RARELY)
            self._look_at = time.monotonic() + self._pause

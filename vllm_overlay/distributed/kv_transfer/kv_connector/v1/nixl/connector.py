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
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

from vllm_overlay.distributed.kv_transfer import fix_counts
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.claims import ClaimsBlocks
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.notifications import (
    pending_notifications,
)
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.unseen_ends import UnseenEnds

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


@dataclass(frozen=True)
class WorkerReport(KVConnectorWorkerMetadata):
    """What a worker tells its scheduler in a step; over ranks, all of it.

    Attributes:
        pending: What its notifications have before them.
        agents: The worker's own NIXL agent; said once. This and the rest is for `confirmed_reads`.
        heard: Which agents have told it that they have read which requests' blocks.
        ended: Requests whose blocks it has given up unread.
        unseen: By request, whether its read has ended while nobody looked (`unseen_ends`).
        fixes: How often which fix has acted in it, for `fix_counts`.
    """

    pending: int
    agents: frozenset[str] = frozenset()
    heard: Mapping[str, frozenset[str]] = field(default_factory=dict)
    ended: frozenset[str] = frozenset()
    unseen: Mapping[str, bool] = field(default_factory=dict)
    fixes: Mapping[str, int] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """Join the reports of two ranks."""
        if not isinstance(other, WorkerReport):
            return self
        both = self.heard.keys() | other.heard.keys()
        waited = self.unseen.keys() | other.unseen.keys()
        return WorkerReport(
            self.pending + other.pending,
            self.agents | other.agents,
            {i: self.heard.get(i, frozenset()) | other.heard.get(i, frozenset()) for i in both},
            self.ended | other.ended,
            {i: self.unseen.get(i, True) and other.unseen.get(i, True) for i in waited},
            Counter(self.fixes) + Counter(other.fixes),
        )


class WakesIdleEngine(WantsLooks):
    """A base for `NixlConnector`, which is built once for the scheduler and once per worker."""

    connector_worker: NixlConnectorWorker | None
    connector_scheduler: Any

    _pending = 0
    _introduced = False
    _pause = SOON
    _look_at: float | None = None

    # Worker side.

    def build_connector_worker_meta(self) -> WorkerReport | None:
        """Report in each step while notifications wait, and once that they no longer do; and what
        is new.
        """
        worker = self.connector_worker
        if worker is None:
            return None
        pending, before = pending_notifications(worker), self._pending
        self._pending = pending
        noted = vars(worker)
        name = getattr(worker.nixl_wrapper, "name", None)
        agents = frozenset([name] if name and not self._introduced else ())
        self._introduced = True
        heard, noted["_heard"] = noted.get("_heard"), {}
        ended = frozenset(noted.pop("_ended_leases", ()))
        unseen = {}
        if isinstance(self, ClaimsBlocks):  # a worker that is pushed to keeps what it never gets
            unseen = noted.setdefault("_unseen_ends", UnseenEnds()).look(worker)
        fixes = fix_counts.taken()
        if not (pending or before or agents or heard or ended or unseen or fixes):
            return None
        return WorkerReport(pending, agents, heard or {}, ended, unseen, fixes)

    # Scheduler side.

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take the workers' report; no report is no news."""
        report = connector_output.kv_connector_worker_meta
        if not isinstance(report, WorkerReport):
            return
        fix_counts.add(report.fixes)
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

# SPDX-License-Identifier: Apache-2.0
"""All releases: which reads have ended while D did not look, as it took no steps for long.

A paused engine core takes none (/pause in mode keep or wait, while weights are updated). NIXL reads
on meanwhile, so that a read is over long before D sees it, and by then P's lease may be too. When
it ended nobody can say any more. `confirmed_reads` uses what was read then, as stock does.

Only a read that was begun before can have ended so. One that began afterwards, as its handshake
had lasted until the pause, may well have read blocks that P had given away.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.worker import NixlConnectorWorker

LONG = 5.0
"""Seconds without a step. An engine with reads under way takes one after the other; what makes one
stand still for so long, but a pause, is a call of all its workers (a profile that is written)."""


class UnseenEnds:
    """What one worker knows of its reads from step to step."""

    def __init__(self) -> None:
        """Begin before the first step."""
        self._looked = time.monotonic()
        self._begun: dict[str, bool] = {}  # by request whose KV was not there yet

    def look(self, worker: NixlConnectorWorker) -> dict[str, bool]:
        """Look at the reads, at the end of a step.

        Returns:
            By request that waited for its KV at the last look, if that was long ago: whether this
            worker's read had begun by then and is over now. Else nothing.
        """
        posted = getattr(worker, "_recving_transfers", {})  # somebody else's may have none
        now = time.monotonic()
        before, since = self._begun, now - self._looked
        self._looked = now
        self._begun = {
            req_id: req_id in posted for req_id in [*getattr(worker, "_recving_metadata", ())]
        }
        if since <= LONG:
            return {}
        return {req_id: begun and req_id not in posted for req_id, begun in before.items()}

# SPDX-License-Identifier: Apache-2.0
"""Up to 0.19.1: what the NIXL connector goes by where all of it is one file.

The overlay names things as releases from 0.20.0 on do; here older names are joined to those.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any, TypeVar

from vllm.distributed.kv_transfer.kv_connector.utils import EngineId, TpKVTopology

Worker = TypeVar("Worker", bound=type[Any])


def knows_topology(worker: Worker) -> Worker:
    """Let the `kv_topo` of a worker class go by the name that 0.20.0 gave it, `transfer_topo`."""
    worker.transfer_topo = property(attrgetter("kv_topo"))
    return worker


class HeadsTopology(TpKVTopology):  # type: ignore[misc, unused-ignore]
    """Ranks of one head each hold copies of what ranks hold that have one as well, no others do."""

    def is_kv_replicated(self, engine_id: EngineId) -> bool:
        """Return whether ranks of a peer hold the same as one another, or as this rank."""
        size, heads = self.remote_tp_size[engine_id], self.total_num_kv_heads
        return size > heads or size == heads <= self.tp_size

# SPDX-License-Identifier: Apache-2.0
"""Up to 0.19.1: what the NIXL connector goes by where all of it is one file.

The overlay names things as releases from 0.20.0 on do; here older names are joined to those.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any, TypeVar

Worker = TypeVar("Worker", bound=type[Any])


def knows_topology(worker: Worker) -> Worker:
    """Let the `kv_topo` of a worker class go by the name that 0.20.0 gave it, `transfer_topo`."""
    worker.transfer_topo = property(attrgetter("kv_topo"))
    return worker

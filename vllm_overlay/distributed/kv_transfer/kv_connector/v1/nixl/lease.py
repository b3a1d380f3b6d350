# SPDX-License-Identifier: Apache-2.0
"""Up to 0.26.0: lease deadlines that mean the same on every node.

P's scheduler stamps how long a finished request's blocks are kept for D
(``VLLM_NIXL_ABORT_REQUEST_TIMEOUT`` from now) on its own ``time.perf_counter``; each P worker
compares the deadline with its own. That clock starts anywhere, and on another machine somewhere
else: over there the lease has run out before it began, or lasts for days. Wall clocks would have
to be set alike on all nodes. What all clocks agree on is how long something takes, so what
travels is the time that is left.
"""

from __future__ import annotations

import time
from typing import Any


class CarriesLeases:
    """Mixin for connector metadata with `reqs_to_send`, request id -> deadline.

    A deadline is in seconds on this process's ``time.perf_counter``. The metadata reaches workers
    in other processes by pickling, where deadlines become the seconds left, and back. So nobody
    who makes or reads deadlines has to know; the time on the way, usually less than an engine
    step, is added to the lease. Within one process nothing is pickled and nothing changes.
    """

    reqs_to_send: dict[str, float]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "reqs_to_send": _shifted(self.reqs_to_send, -time.perf_counter())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.reqs_to_send = _shifted(self.reqs_to_send, time.perf_counter())


def _shifted(deadlines: dict[str, float], seconds: float) -> dict[str, float]:
    return {req_id: deadline + seconds for req_id, deadline in deadlines.items()}

# SPDX-License-Identifier: Apache-2.0
"""From 0.31.0 on: a request whose receive has failed does not hold up those that hold blocks.

The scheduler looks first at who holds blocks: what has been received, or is about to be. If a
receive of several KV-cache groups fails, the request is set back to its start and its blocks are
freed, but it is left among these. When it then has no room, nobody behind it is looked at, though
they have all that they need, and what they would free is what it waits for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, TypeAlias

from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

    Handle: TypeAlias = Callable[[Scheduler, Request], bool]


def holders_first(handle: Handle) -> Handle:
    """Make `Scheduler._handle_blocked_waiting_request` skip for a step who has lost its blocks.

    It is then put in front of those that hold none. Where nobody else holds any it goes on at once.
    """

    @wraps(handle)
    def handle_holders(self: Scheduler, request: Request) -> bool:
        received = request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
        ready = handle(self, request)
        lost = received and not request.num_computed_tokens
        return ready and not (lost and len(self.kv_holding_waiting) > 1)

    return handle_holders

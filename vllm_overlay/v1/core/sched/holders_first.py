# SPDX-License-Identifier: Apache-2.0
"""From 0.30.0 on: a request whose receive has failed does not hold up those that hold blocks.

The scheduler looks first at who holds blocks: what has been received, or is about to be. If a
receive of several KV-cache groups fails, the request is set back to its start and its blocks are
freed, but it is left among these. When it then has no room, nobody behind it is looked at, though
they have all that they need, and what they would free is what it waits for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.request_queue import RequestQueue
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request


def lets_holders_run(scheduler: Scheduler, request: Request) -> bool:
    """Put a request that found no room in front of those that hold no blocks, if it is one of them.

    So are those right behind it that hold none either, in their order.

    Returns:
        Whether it stood in front of others that do hold some; they are to be looked at now.
    """
    # In 0.30.0 it is a queue of those, too, that wait for something else.
    known = hasattr(scheduler, "kv_holding_waiting")
    holders: RequestQueue = getattr(scheduler, "kv_holding_waiting" if known else "skipped_waiting")
    if not holders or holders.peek_request() is not request:
        return False
    if request.num_computed_tokens or not any(one.num_computed_tokens for one in holders):
        return False
    moved = [holders.pop_request()]
    while not holders.peek_request().num_computed_tokens:
        moved.append(holders.pop_request())
    for one in reversed(moved):
        scheduler.waiting.prepend_request(one)
    return True

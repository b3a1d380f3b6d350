# SPDX-License-Identifier: Apache-2.0
"""All releases: where a request claims the blocks that wait for it elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.claims import claim_offered

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request


def claims_blocks(
    add_request: Callable[[Scheduler, Request], None],
) -> Callable[[Scheduler, Request], None]:
    """Have `Scheduler.add_request` settle whether the request may use the blocks it names.

    Not when it is scheduled first: until then it may be aborted, which gives them up.
    """

    @functools.wraps(add_request)
    def wrapper(self: Scheduler, request: Request) -> None:
        claim_offered(self, request)
        add_request(self, request)

    return wrapper

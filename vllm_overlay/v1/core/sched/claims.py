# SPDX-License-Identifier: Apache-2.0
"""All releases: where a request claims the blocks that wait for it elsewhere, and gives that up."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

from vllm.v1.request import RequestStatus

from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.claims import (
    claim_offered,
    give_back_unread,
)

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

_Finished = TypeVar("_Finished")


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


def gives_claims_back(
    finish_requests: Callable[[Scheduler, str | Iterable[str] | None, RequestStatus], _Finished],
) -> Callable[[Scheduler, str | Iterable[str] | None, RequestStatus], _Finished]:
    """Have `Scheduler.finish_requests` give back the claims of those whose receives have failed."""

    @functools.wraps(finish_requests)
    def wrapper(
        self: Scheduler, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> _Finished:
        if finished_status is RequestStatus.FINISHED_ERROR:
            if isinstance(request_ids, str):
                request_ids = (request_ids,)
            request_ids = set(self.requests if request_ids is None else request_ids)
            for req_id in request_ids & self.requests.keys():
                request = self.requests[req_id]
                if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
                    give_back_unread(self, request)
        return finish_requests(self, request_ids, finished_status)

    return wrapper

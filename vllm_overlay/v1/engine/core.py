# SPDX-License-Identifier: Apache-2.0
"""All releases: the engine core's side of a rejection.

May it be told, and a request that is only aborted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.claims import Source, may_release

if TYPE_CHECKING:
    from vllm.v1.core.sched.interface import SchedulerInterface
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.request import Request


class GrantsReleases:
    """A base for `EngineCore`.

    Where several engine cores share one API, any of them may get a request that is sent again,
    and only one gets the stand-in of a refused one. So all are asked first.
    """

    scheduler: SchedulerInterface

    def claim_kv_transfer(self, engine_id: str, request_id: str, claimant: str) -> bool:
        """Whether `claimant`, a stand-in, may give up the blocks of a peer's request.

        A utility method: the API server calls it by its name, and an engine core without it
        answers with a failure.

        Args:
            engine_id: the peer, `remote_engine_id`.
            request_id: the request there, `remote_request_id`.
            claimant: the stand-in's own id.
        """
        scheduler = cast("Scheduler", self.scheduler)
        return may_release(scheduler, Source(engine_id, request_id), claimant)


def abort_if_asked(core: EngineCore, request: Request) -> None:
    """Abort a request that was just added with `abort_immediately`.

    It was never scheduled, so the connector sees a remote prefill that nobody read and releases
    it on the peer: the same path as for a client that leaves while its request waits.
    """
    if request.abort_immediately:
        core.abort_requests([request.request_id])

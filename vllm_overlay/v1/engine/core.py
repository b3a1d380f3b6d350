# SPDX-License-Identifier: Apache-2.0
"""The engine core's side of a rejection: a request that arrives only to be aborted."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.request import Request


def abort_if_asked(core: EngineCore, request: Request) -> None:
    """Abort a request that was just added with `abort_immediately`.

    It was never scheduled, so the connector sees a remote prefill that nobody read and releases
    it on the peer: the same path as for a client that leaves while its request waits.
    """
    if request.abort_immediately:
        core.abort_requests([request.request_id])

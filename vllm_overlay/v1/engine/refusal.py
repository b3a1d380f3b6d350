# SPDX-License-Identifier: Apache-2.0
"""From 0.33.0 on: a request that the engine core refuses, before its scheduler has it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.v1.engine import EngineCoreRequest, EngineCoreRequestType
from vllm.v1.request import Request

from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.claims import source_of
from vllm_overlay.v1.engine.stand_in import make_stand_in, stand_in_id, takes_stand_ins

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCoreProc


def frees_refused(
    refuse: Callable[[EngineCoreProc, EngineCoreRequest, Any], None],
) -> Callable[[EngineCoreProc, EngineCoreRequest, Any], None]:
    """Have an answer of HTTP 400 to a request's client go along with a stand-in for the request.

    The client has to send another one, so nobody will read. That holds for no other refusal of
    the engine core: what is answered with 5xx, or while it shuts down, a router sends again, to
    this engine or another, and that one is to find the blocks.
    """

    @functools.wraps(refuse)
    def wrapper(self: EngineCoreProc, request: EngineCoreRequest, error: Any) -> None:  # noqa: ANN401
        refuse(self, request, error)
        sampling = request.sampling_params
        extra = (sampling.extra_args if sampling is not None else None) or {}
        params: Any = extra.get("kv_transfer_params")
        if (
            source_of(params) is None
            or not params.get("do_remote_prefill")
            or not takes_stand_ins(self.vllm_config.kv_transfer_config)
            # One of several engine cores behind one API: the others would have to be asked.
            or self.publish_dp_lb_stats
        ):
            return
        stand_in = make_stand_in(stand_in_id(request.request_id), params, None)
        stand_in.client_index = request.client_index
        # This runs in the thread that reads the socket; the scheduler belongs to another.
        added = Request.from_engine_core_request(stand_in, self.request_block_hasher)
        self.input_queue.put_nowait((EngineCoreRequestType.ADD, (added, request.current_wave)))

    return wrapper

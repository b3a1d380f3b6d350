# SPDX-License-Identifier: Apache-2.0
"""From 0.21.0 on: with transfers in both directions every request ends, and its blocks come back.

With `bidirectional_kv_xfer` P reads what D has kept of an earlier turn. It does that once for each
request, but promised the scheduler those tokens whenever it was asked: a request that came back to
the queue, as its read had failed or it was preempted, waited for a read that nobody would begin.
And D kept the blocks of a request that it had not read from anybody, without its workers knowing:
nobody freed them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.scheduler import has_engine

if TYPE_CHECKING:
    from vllm.v1.request import Request

_Part = Any
"""NIXL's part of a scheduler: `NixlConnectorScheduler`, from 0.24.0 on the one that pulls."""

_Method = Callable[..., Any]


def ends_second_turns(match: _Method) -> _Method:
    """Have `get_num_new_matched_tokens` promise what will be read, and tell D's workers of what it
    may keep: those of a request that asks for a read are told by upstream, for P as for D."""

    @functools.wraps(match)
    def wrapper(self: _Part, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        params = request.kv_transfer_params
        found: tuple[int, bool] = match(self, request, num_computed_tokens)
        if not params or params.get("do_remote_prefill") or not has_engine(self):
            return found
        if not params.get("do_remote_decode"):
            if self.is_bidirectional_kv_xfer_enabled:
                self._reqs_in_batch.add(request.request_id)
        # With a host buffer P saves its own blocks, and reads none.
        elif params.get("_remote_blocks_processed") or self.use_host_buffer:
            return 0, False
        return found

    return wrapper

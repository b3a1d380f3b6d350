# SPDX-License-Identifier: Apache-2.0
"""0.19.0 to 0.28.0: P leaves out the last token of a prompt when the request is added.

Of a model with recurrent states D computes the last token of each prompt itself, on top of P's
state of those before it, so P must not. Stock takes it out of the request when NIXL is asked what
it can load: after the prefix cache has been looked up for the whole prompt, of which it may hold
all that is left. Then there is no token to compute, which ends the engine. Upstream's 0.29.0 does
it when the request is added, as here, also for requests that load and prefill at once (below).
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any

from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.present import connectors_in

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1.request import Request

_Part = Any
"""NIXL's part of a scheduler: `NixlConnectorScheduler`, from 0.24.0 on one that pulls or pushes."""


def leave_out_last_token(part: _Part, request: Request) -> None:
    """Take the last token out of a prompt that is prefilled for a D, where the model has states.

    Args:
        part: NIXL's part of the scheduler; some of upstream's tests make it without a constructor.
        request: one that is being added. Up to 0.23.0 nobody has looked at its parameters yet.
    """
    params: object = request.kv_transfer_params
    if not vars(part).get("_has_mamba") or not isinstance(params, dict):
        return
    if params.get("do_remote_decode") is not True:
        return
    if params.get("do_remote_prefill") and request.prompt_token_ids:
        # It loads all but the last token and computes that one. Stock shortens it only where these
        # are in the cache, which leaves no token; as one that loads it stays whole.
        params["_p_side_truncated"] = True
    else:
        # In an engine without a process of its own the list is also that of the next choice
        # (n > 1), which is added after this one.
        request.prompt_token_ids = copy(request.prompt_token_ids)
        part._truncate_mamba_request_for_prefill(request)


def leave_out_last_token_for(connector: KVConnectorBase_V1 | None, request: Request) -> None:
    """Do so up to 0.23.0; up to 0.21.0 no connector hears of a request that is added.

    Args:
        connector: of the scheduler; NIXL's, one that has NIXL's inside, another, or none.
        request: see above.
    """
    for each in connectors_in(connector):
        part = getattr(each, "connector_scheduler", None)
        if hasattr(part, "_truncate_mamba_request_for_prefill"):  # no other connector's has it
            leave_out_last_token(part, request)

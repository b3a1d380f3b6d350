# SPDX-License-Identifier: Apache-2.0
"""All releases: one prefill request, one reader, also when a request becomes several.

A client's request may become several engine requests: `n` samples of a prompt, several prompts
in one completion, a batch of conversations, further turns after a tool call. All carry the
client's `kv_transfer_params`, which name the blocks of *one* request on the prefill server. That
server frees them when the first reader is done, so a second one reads whatever has been put there
since, or another prompt's KV in the first place. Therefore only the first of them keeps the
parameters; the others compute their prompt, or find it in the prefix cache.

The same holds on the prefill server, where each of them would hold its blocks for a reader, and
the answer names those of one: the first prompt's first sample. See `RemembersTransfer`.

So it is where a connector is NIXL's, and D pulls. Others may know each request on both sides
(MoRIIO's ends its engine over one that it does not know; a P that pushes with NIXL has a push for
each, which D awaits) or serve several readers (Mooncake's); of these all keep their parameters.
But of a later turn a P that pushes knows nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.sampling_params import SamplingParams

from vllm_overlay.distributed.kv_transfer.fix_counts import Acted, count
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.params import are_for, of_transfer
from vllm_overlay.v1.engine.stand_in import configured, transfer_config

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig

Params = TypeVar("Params")

_Knows = Callable[[str | None, str | None], bool]
"""Whether a connector is of a kind, by its name and its module path."""


def transfer_once(params: Params, index: int, owner: Any) -> Params:  # noqa: ANN401
    """Return the parameters for the `index`-th of the engine requests made of one request.

    The first (0) gets `params` as they are. So do all of them where nothing is transferred, or D
    does not pull with NIXL. Any other gets a copy without what belongs to the transfer: siblings
    share `params`, and whatever else is in them (other connectors have settings there) stays.

    Args:
        params: as the client gave them, for a beam search or a pooling model others than these.
        index: of the engine request, from 0.
        owner: an engine, or an endpoint, which has a client of one.
    """
    return params if index == 0 else _without_transfer(params, owner, are_for)


def transfer_done(params: Params, owner: Any) -> Params:  # noqa: ANN401
    """Return the parameters for a further turn of a request whose first turn had `params`."""
    return _without_transfer(params, owner, _are_nixls)


def _without_transfer(params: Params, owner: Any, known: _Knows) -> Params:  # noqa: ANN401
    if not isinstance(params, SamplingParams) or not params.extra_args:
        return params
    transfer = params.extra_args.get("kv_transfer_params")
    if not isinstance(transfer, dict) or not (
        transfer.get("do_remote_prefill") or transfer.get("do_remote_decode")
    ):
        return params
    if not _has_one(transfer_config(getattr(owner, "engine_client", owner)), known):
        return params
    count(Acted.FURTHER_READER)
    own = copy(params)
    own.extra_args = {k: v for k, v in params.extra_args.items() if k != "kv_transfer_params"}
    if rest := {name: value for name, value in transfer.items() if not of_transfer(name)}:
        own.extra_args["kv_transfer_params"] = rest
    return own


def _are_nixls(connector: str | None, module_path: str | None) -> bool:
    pushes = connector == "NixlPushConnector" and not module_path
    return pushes or are_for(connector, module_path)


def _has_one(config: KVTransferConfig | None, known: _Knows) -> bool:
    """Whether the connector that is configured is `known`, or one of several.

    Whatever class holds them: Dynamo has a `MultiConnector` of its own.
    """
    return config is not None and any(known(*each) for each in configured(config))


class RemembersTransfer:
    """Mixin for `ParentRequest`: keeps what its first child's answer says about its KV.

    The client's answer is made when the last child is done, which may be any of them.
    """

    _kv_transfer_params: dict[str, Any] | None = None

    def answer_transfer(self, kv_transfer_params: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return what the answer says, given what the child that is heard just now says."""
        if kv_transfer_params is not None:
            self._kv_transfer_params = kv_transfer_params
        return self._kv_transfer_params

# SPDX-License-Identifier: Apache-2.0
"""All releases: a client of P/D is told how much of its prompt P had in its cache.

D receives a prompt, counts what it received as cached, and said so in `usage`: a client pays for
nearly nothing, or looks for hits that never were. P's own count travels with its
answer, under the name that upstream's 0.31.0 gave it, so either side may be stock of that release.

D's own count stays what its metrics go by. Upstream overwrites it, and then
`vllm:request_prefill_kv_computed_tokens` says that D has computed what it received.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import TypeGuard

    from vllm.outputs import PoolingRequestOutput, RequestOutput
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.output_processor import RequestState

FIELD = "remote_prefill_cached_tokens"
"""In `kv_transfer_params`: tokens of the prompt that P did not compute (0.31.0, PR 54222)."""

_NIXLS = "remote_request_id"
"""In what P answers with NIXL, where D pulls or P pushes, and in no other connector's answer."""


def hears_prefills_count(make: Callable[..., Any]) -> Callable[..., Any]:
    """Have the state of a new request know what P said, and report it; below `classmethod`."""

    @functools.wraps(make)
    def wrapper(
        cls: type[RequestState],
        tokenizer: object,
        request: EngineCoreRequest,
        *args: Any,  # noqa: ANN401 - passed on as they are
        **named: Any,  # noqa: ANN401
    ) -> RequestState:
        state = make(cls, tokenizer, request, *args, **named)
        params = _transfer_of(request)
        if _is_nixls(params):
            count = params.get(FIELD)
            state._said_by_prefill = count if type(count) is int and count >= 0 else None
            # From 0.31.0 on it would become D's own count.
            state.remote_prefill_cached_tokens = None
        # The others make their outputs, one for each token, with nothing in between. Of several
        # samples the first is made first, and from K10 on the only one that transfers.
        parent, transfers = state.parent_req, _is_nixls(params) or _may_be_nixls(params)
        if parent is not None and transfers:
            parent._transfers = True
        if transfers or getattr(parent, "_transfers", False):
            plain, itself = type(state).make_request_output, weakref.ref(state)
            state.make_request_output = functools.partial(_report, plain, itself)
        return state

    return wrapper


def _report(  # the first five arguments of `plain` are the same on all releases
    plain: Callable[..., RequestOutput | PoolingRequestOutput | None],
    itself: weakref.ref[RequestState],
    new_token_ids: list[int],
    pooling_output: object,
    finish_reason: object,
    stop_reason: object,
    kv_transfer_params: dict[str, Any] | None = None,
    *args: Any,  # noqa: ANN401 - passed on as they are
    **named: Any,  # noqa: ANN401
) -> RequestOutput | PoolingRequestOutput | None:
    """Have what a client gets say P's count, as D, and hand it to D, as P."""
    state: Any = itself()
    if _is_nixls(kv_transfer_params):
        own = max(0, state.num_cached_tokens)
        kv_transfer_params = {FIELD: own, **kv_transfer_params}
    said = new_token_ids, pooling_output, finish_reason, stop_reason, kv_transfer_params
    output = plain(state, *said, *args, **named)
    count = _for_the_client(state)
    if output is not None and count is not None:
        output.num_cached_tokens = count  # type: ignore[union-attr, unused-ignore]
    return output


def _for_the_client(state: Any) -> int | None:  # noqa: ANN401 - `RequestState`, that has heard
    """Return P's count, or that of the first sample's prompt, which is the one that D receives.

    It is never more than D's own: who says that P had a lot cached, and transfers nothing, is not
    believed. Before the first sample is heard the others speak for themselves (None).
    """
    said: int | None = getattr(state, "_said_by_prefill", None)
    count = None if said is None else min(said, max(0, state.num_cached_tokens))
    if state.parent_req is None:
        return count
    if count is not None:
        state.parent_req._cached_at_prefill = count
    return getattr(state.parent_req, "_cached_at_prefill", None)


def _transfer_of(request: EngineCoreRequest) -> object:
    """Return what a client, or its router, says of the transfer."""
    sampling = request.sampling_params
    return (sampling.extra_args or {}).get("kv_transfer_params") if sampling else None


def _may_be_nixls(params: object) -> bool:
    """Whether it is what P is asked with, of any connector that has prefill servers."""
    return isinstance(params, dict) and bool(params.get("do_remote_decode"))


def _is_nixls(params: object) -> TypeGuard[dict[str, Any]]:
    """Whether it is what a P with NIXL has answered, for D to read."""
    return isinstance(params, dict) and bool(params.get("do_remote_prefill")) and _NIXLS in params

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
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.outputs import PoolingRequestOutput, RequestOutput
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.output_processor import RequestState

FIELD = "remote_prefill_cached_tokens"
"""In `kv_transfer_params`: tokens of the prompt that P did not compute (0.31.0, PR 54222)."""

_NIXLS = "remote_request_id"
"""In what P answers with NIXL, and in no other connector's answer."""


def hears_prefills_count(make: Callable[..., Any]) -> Callable[..., Any]:
    """Have the state of a new request know what P said; below `classmethod`."""

    @functools.wraps(make)
    def wrapper(
        cls: type[RequestState],
        tokenizer: object,
        request: EngineCoreRequest,
        *args: Any,  # noqa: ANN401 - passed on as they are
        **named: Any,  # noqa: ANN401
    ) -> RequestState:
        state = make(cls, tokenizer, request, *args, **named)
        state._said_by_prefill = _said_by_prefill(request, state.prompt_len)
        state.remote_prefill_cached_tokens = None  # from 0.31.0 on it would become D's own count
        return state

    return wrapper


def reports_prefills_count(make: Callable[..., Any]) -> Callable[..., Any]:
    """Have what a client gets say P's count, as D, and hand it to D, as P."""

    @functools.wraps(make)
    def wrapper(
        self: Any,  # noqa: ANN401 - `RequestState`, with what it has heard
        *args: Any,  # noqa: ANN401 - passed on as they are
        **named: Any,  # noqa: ANN401
    ) -> RequestOutput | PoolingRequestOutput:
        output = make(self, *args, **named)
        said = getattr(self, "_said_by_prefill", None)
        if said is not None:
            output.num_cached_tokens = said
        params = getattr(output, "kv_transfer_params", None)  # a pooled answer has none
        if isinstance(params, dict) and params.get("do_remote_prefill") and _NIXLS in params:
            output.kv_transfer_params = {FIELD: max(0, self.num_cached_tokens), **params}
        return output

    return wrapper


def _said_by_prefill(request: EngineCoreRequest, prompt_len: int) -> int | None:
    """Return P's count; None where D is not to read, or the word is no count of this prompt."""
    sampling = request.sampling_params
    params = (sampling.extra_args or {}).get("kv_transfer_params") if sampling else None
    if not isinstance(params, dict) or not params.get("do_remote_prefill"):
        return None
    count = params.get(FIELD)
    return count if type(count) is int and 0 <= count <= prompt_len else None

# SPDX-License-Identifier: Apache-2.0
"""Up to 0.28.0: the `kv_transfer_params` that a token-level request has in a field of its own.

Its handler reads those among the sampling parameters. So the field's are put there, before
anything looks, unless the client has put some there already: those have always counted. (From
0.29.0 on upstream has the field count first.) That is for NIXL that pulls, alone or as one of
several: other connectors may end an engine whose router speaks NIXL's language to them, and get
what they got.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from vllm_overlay.entrypoints.rejection import transferring_engine
from vllm_overlay.entrypoints.serve.disagg.api_router import TAKES_OWN

if TYPE_CHECKING:
    from fastapi import Request


def takes_own_params(
    generate: Callable[..., Coroutine[Any, Any, Any]],
) -> Callable[..., Coroutine[Any, Any, Any]]:
    """Have the endpoint of token-level requests take what stands in their own field.

    It is the endpoint and not its handler, because there a request was made of a body and is
    nobody else's: who calls the handler may use the same sampling parameters for many.
    """

    @functools.wraps(generate)
    async def wrapper(request: Any, raw_request: Request) -> Any:  # noqa: ANN401
        if transferring_engine(raw_request.scope) is not None:
            _hand_on(request)
        return await generate(request, raw_request)

    setattr(wrapper, TAKES_OWN, True)
    return wrapper


def _hand_on(request: Any) -> None:  # noqa: ANN401 - its module has moved between releases
    """Put the field's parameters where the handler looks, if there are none.

    Empty ones ask for nothing.
    """
    given = request.sampling_params.extra_args or {}
    if request.kv_transfer_params and given.get("kv_transfer_params") is None:
        extra = {**given, "kv_transfer_params": request.kv_transfer_params}
        request.sampling_params.extra_args = extra

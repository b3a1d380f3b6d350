# SPDX-License-Identifier: Apache-2.0
"""Transfer parameters and rejections as handlers see them that share `GenerateBaseServing`.

On 0.33.0 it stands where `OpenAIServing` stands up to 0.22.1; see
`vllm_overlay.entrypoints.openai.engine.serving` for that one.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from vllm.entrypoints.serve.engine.serving import BaseServing
from vllm.sampling_params import SamplingParams

from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.params import find_unsendable
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import (
    find_pull_problem,
)
from vllm_overlay.v1.engine.admission import current_exchange

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient
    from vllm.entrypoints.pooling.typing import AnyPoolingRequest
    from vllm.entrypoints.serve.engine.protocol import ErrorResponse
    from vllm.entrypoints.serve.engine.typing import AnyRequest

_PULL = ("NixlConnector", "NixlPullConnector")


def leaves_to_route(
    cleanup: Callable[..., Awaitable[Any]],
) -> Callable[..., Awaitable[Any]]:
    """Have `_with_kv_transfer_rejection_cleanup` do nothing where a route watches the request.

    `KVTransferRoute` decides later and with better knowledge. Callers that use a handler without
    HTTP keep upstream's own clean-up.
    """

    @functools.wraps(cleanup)
    async def wrapper(
        self: BaseServing,
        awaitable: Awaitable[Any],
        *request: Any,  # noqa: ANN401 - passed on as they are
    ) -> Any:  # noqa: ANN401 - whatever the endpoint returns
        if current_exchange() is not None:
            return await awaitable
        return await cleanup(self, awaitable, *request)

    return wrapper


class ChecksTransferParams(BaseServing):
    """A base for `GenerateBaseServing`: its handlers refuse parameters that NIXL cannot use.

    `_check_model` is the first thing that every handler does, when the answer is still open, for
    a stream as well. Only NIXL's parameters are known in detail; with several connectors they may
    be meant for another one.
    """

    engine_client: EngineClient

    async def _check_model(self, request: AnyRequest | AnyPoolingRequest) -> ErrorResponse | None:
        if (error := await super()._check_model(request)) is not None:
            return error
        params = _transfer_params(request)
        if params is None:
            return None
        problem = find_unsendable(params)
        config = self.engine_client.vllm_config.kv_transfer_config
        if config is not None and config.kv_connector in _PULL:
            problem = problem or find_pull_problem(params)
        if problem is None:
            return None
        return self.create_error_response(
            str(problem), param=f"kv_transfer_params.{problem.field}".rstrip(".")
        )


def _transfer_params(request: AnyRequest | AnyPoolingRequest) -> object:
    """What the handler will use; many kinds of requests have no such field."""
    params = getattr(request, "kv_transfer_params", None)
    # Where it is no field, a client's own word of that name is kept as it came.
    sampling = getattr(request, "sampling_params", None)
    if params is None and isinstance(sampling, SamplingParams):
        return (sampling.extra_args or {}).get("kv_transfer_params")
    return params

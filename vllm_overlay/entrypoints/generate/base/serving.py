# SPDX-License-Identifier: Apache-2.0
"""From 0.24.0 on: parameters and rejections as handlers of `GenerateBaseServing` see them.

It stands where `OpenAIServing` stands up to 0.23.0; see
`vllm_overlay.entrypoints.openai.engine.serving` for that one.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from vllm.entrypoints.serve.engine.serving import BaseServing

from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import (
    find_pull_problem,
)
from vllm_overlay.entrypoints.transfer_params import refused, transfer_params
from vllm_overlay.v1.engine.admission import current_exchange

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient

ErrorResponse = Any
"""vLLM's own; 0.29.0 moved it to another module."""


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
        **named: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401 - whatever the endpoint returns
        if current_exchange() is not None:
            return await awaitable
        return await cleanup(self, awaitable, *request, **named)

    return wrapper


class ChecksTransferParams(BaseServing):
    """A base for `GenerateBaseServing`: its handlers refuse parameters that NIXL cannot use.

    `_check_model` is the first thing that every handler does, when the answer is still open, for
    a stream as well.
    """

    engine_client: EngineClient
    _field_first = True
    """Whether what a token-level request has in its field goes before its sampling parameters."""

    async def _check_model(
        self,
        request: Any,  # noqa: ANN401 - 0.24.0 takes fewer kinds here than later releases
    ) -> ErrorResponse | None:
        if (error := await super()._check_model(request)) is not None:
            return error
        return refused(
            transfer_params(request, field_first=self._field_first),
            self.engine_client,
            find_pull_problem,
            self.create_error_response,
        )

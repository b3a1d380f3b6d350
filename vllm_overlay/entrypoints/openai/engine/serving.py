# SPDX-License-Identifier: Apache-2.0
"""Up to 0.23.0: rejections as the handlers of the OpenAI-style endpoints see them."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from vllm.entrypoints.openai.engine.protocol import ErrorResponse

from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.params import find_problem
from vllm_overlay.entrypoints.rejection import notify, remote_prefill, tell
from vllm_overlay.entrypoints.transfer_params import refused, transfer_params
from vllm_overlay.entrypoints.verdict import is_final
from vllm_overlay.v1.engine.admission import current_exchange, open_exchange
from vllm_overlay.v1.engine.stand_in import takes_stand_ins, transfer_config

if TYPE_CHECKING:
    from fastapi import Request
    from vllm.engine.protocol import EngineClient
    from vllm.entrypoints.openai.engine.serving import AnyRequest, OpenAIServing

T = TypeVar("T")


class TransferRequest(Protocol):
    """A request for a completion, for a chat's or, from 0.19.0 on, for a response."""

    request_id: str
    kv_transfer_params: dict[str, Any] | None


class KVTransferRejection:
    """A base for `OpenAIServing`."""

    engine_client: EngineClient
    create_error_response: Callable[..., ErrorResponse]

    @functools.cached_property
    def has_kv_connector(self) -> bool:
        """Whether this server moves KV blocks at all; else nothing waits anywhere."""
        return transfer_config(self.engine_client) is not None

    async def _with_kv_transfer_rejection_cleanup(
        self,
        awaitable: Awaitable[T],
        request: TransferRequest,
        raw_request: Request | None,
    ) -> T:
        """Await a handler; free the prefill server's blocks if it refuses its request for good.

        Somebody else's connector is told of all that does not get to the engine, by the id that it
        has, as by upstream (from 0.21.0 on): blocks may wait for what is sent again, but that is
        NIXL's way.

        Where a route watches over the whole request (`KVTransferRoute`) that decides, later and
        with better knowledge, and is told of the refusal: its endpoint may make a 500 of it. By
        itself this serves callers that use a handler without HTTP.
        """
        params = remote_prefill(request.kv_transfer_params)
        if params is None or not self.has_kv_connector:
            return await awaitable
        known = takes_stand_ins(transfer_config(self.engine_client))

        def tell_prefill() -> Awaitable[None]:
            return notify(self.engine_client, request.request_id, params, raw_request)

        status = 200 if known else 499  # of one that is cancelled
        watched = current_exchange()
        with open_exchange() if watched is None else nullcontext(watched) as exchange:
            try:
                result = await awaitable
                status = result.error.code if isinstance(result, ErrorResponse) else 200
            except Exception as error:
                status = self.create_error_response(error).error.code
                raise
            finally:
                if not known and status != 200:
                    await tell(self.engine_client, request.request_id, params, raw_request)
                elif is_final(status):
                    exchange.refused = True
                    if watched is None:
                        await exchange.end(params, tell_prefill)
        return result


def frees_prefill_on_rejection(
    create: Callable[..., Awaitable[Any]],
) -> Callable[..., Awaitable[Any]]:
    """Run a ``create_*`` method inside `_with_kv_transfer_rejection_cleanup`.

    Up to 0.20, where upstream has no such clean-up: what a handler refuses and an endpoint answers
    with 500 keeps its blocks, as on stock, for whoever sends that to another server.
    """

    @functools.wraps(create)
    async def wrapper(
        self: KVTransferRejection,
        request: TransferRequest,
        raw_request: Request | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the endpoint returns
        if current_exchange() is not None:
            return await create(self, request, raw_request)
        return await self._with_kv_transfer_rejection_cleanup(
            create(self, request, raw_request), request, raw_request
        )

    return wrapper


def checks_kv_transfer_params(
    check: Callable[[OpenAIServing, AnyRequest], Awaitable[ErrorResponse | None]],
) -> Callable[[OpenAIServing, AnyRequest], Awaitable[ErrorResponse | None]]:
    """Have `_check_model`, the first thing that every handler does, look at the parameters too.

    The answer is still open there, for a stream as well.
    """

    @functools.wraps(check)
    async def wrapper(self: OpenAIServing, request: AnyRequest) -> ErrorResponse | None:
        if (error := await check(self, request)) is not None:
            return error
        return refused(
            transfer_params(request, field_first=False),
            self.engine_client,
            find_problem,
            self.create_error_response,
        )

    return wrapper

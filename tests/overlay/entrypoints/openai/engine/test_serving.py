"""Handlers that are used without HTTP: no route watches, so they free what waits themselves."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import Request

from tests.support.serving_app import REMOTE, Server, serving

pytest.importorskip("vllm_overlay.entrypoints.openai.engine.serving", reason="up to 0.22.1")

from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.engine.protocol import ErrorInfo, ErrorResponse

from vllm_overlay.entrypoints.openai.engine.serving import KVTransferRejection
from vllm_overlay.v1.engine.admission import open_exchange


async def complete(
    server: Server,
    raw: Request | None = None,
    **changes: Any,  # noqa: ANN401 - any field
) -> Any:  # noqa: ANN401 - any answer
    fields = {"model": "tiny", "prompt": "hi", "max_tokens": 2, "kv_transfer_params": dict(REMOTE)}
    handler = server.app.state.openai_serving_completion
    try:
        return await handler.create_completion(CompletionRequest(**{**fields, **changes}), raw)
    finally:
        await server.settled()


def test_a_refusal_is_told_once() -> None:
    async def test() -> None:
        async with serving() as server:
            refused = await complete(server, model="no-such-model")
            assert isinstance(refused, ErrorResponse)
            assert server.core.told == [REMOTE]
            assert server.core.admitted == []

    asyncio.run(test())


def test_a_refusal_is_told_where_the_request_is_in_no_application() -> None:
    """As those that Ray Serve LLM makes."""
    scope = {"type": "http", "method": "POST", "path": "/", "headers": [], "query_string": b""}

    async def test() -> None:
        async with serving("--api-key", "secret") as server:
            refused = await complete(server, Request(scope), model="no-such-model")
            assert isinstance(refused, ErrorResponse)
            assert server.core.told == [REMOTE]

    asyncio.run(test())


def test_what_is_served_is_not_told() -> None:
    async def test() -> None:
        async with serving() as server:
            assert not isinstance(await complete(server), ErrorResponse)
            assert server.core.told == []
            assert len(server.core.readers) == 1

    asyncio.run(test())


def test_where_a_route_watches_it_decides() -> None:
    async def test() -> None:
        async with serving() as server:
            with open_exchange():
                refused = await complete(server, model="no-such-model")
            assert isinstance(refused, ErrorResponse)
            assert server.core.requests == []

    asyncio.run(test())


@pytest.mark.parametrize(
    ("connector", "changes"),
    [(None, {}), ("NixlConnector", {"kv_transfer_params": {"do_remote_prefill": False}})],
)
def test_where_nothing_waits(connector: str | None, changes: dict[str, Any]) -> None:
    async def test() -> None:
        async with serving(connector=connector) as server:
            await complete(server, model="no-such-model", **changes)
            assert server.core.requests == []

    asyncio.run(test())


def test_parameters_that_nixl_cannot_use_are_named() -> None:
    async def test() -> None:
        async with serving() as server:
            refused = await complete(server, kv_transfer_params={**REMOTE, "remote_port": "x"})
            assert refused.error.code == 400
            assert refused.error.param == "kv_transfer_params.remote_port"
            assert server.core.admitted == []

    asyncio.run(test())


class Handler(KVTransferRejection):
    """What serves a request by returning what it is given.

    Attributes:
        told: the parameters of the requests that its engine client was told of.
    """

    def __init__(self, connector: str) -> None:
        config = SimpleNamespace(kv_connector=connector, kv_connector_module_path=None)
        self.told: list[dict[str, Any]] = []
        self.engine_client = SimpleNamespace(
            vllm_config=SimpleNamespace(kv_transfer_config=config),
            notify_kv_transfer_request_rejected=self._note,
        )

    async def _note(
        self, name: str, params: dict[str, Any], *, data_parallel_rank: int | None = None
    ) -> None:
        self.told.append(params)

    async def serve(self, answer: object) -> object:
        async def served() -> object:
            return answer

        request = SimpleNamespace(kv_transfer_params=REMOTE, request_id="r")
        return await self._with_kv_transfer_rejection_cleanup(served(), request, None)


REFUSED = ErrorResponse(error=ErrorInfo(message="no", type="BadRequestError", code=400))


@pytest.mark.parametrize("connector", ["NixlConnector", "MooncakeConnector"])
def test_what_is_refused_is_told_and_what_is_served_is_not(connector: str) -> None:
    async def test() -> None:
        handler, served = Handler(connector), object()
        assert await handler.serve(served) is served
        assert handler.told == []
        assert await handler.serve(REFUSED) is REFUSED
        assert handler.told == [REMOTE]

    asyncio.run(test())


def test_a_route_that_watches_is_told_instead() -> None:
    async def test() -> None:
        handler = Handler("NixlConnector")
        with open_exchange() as exchange:
            await handler.serve(REFUSED)
        assert exchange.refused
        assert handler.told == []

    asyncio.run(test())

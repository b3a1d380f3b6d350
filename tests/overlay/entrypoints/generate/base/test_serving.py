"""Handlers of `GenerateBaseServing`: what they refuse, and to whom they leave the clean-up."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.serving_app import ENDPOINTS, REMOTE, body, serving

overlay = pytest.importorskip(
    "vllm_overlay.entrypoints.generate.base.serving", reason="from 0.33.0 on"
)

from vllm_overlay.v1.engine.admission import open_exchange  # noqa: E402


@pytest.mark.parametrize("watched", [False, True])
def test_a_route_that_watches_cleans_up_in_place_of_the_handler(watched: bool) -> None:
    seen: list[tuple[Any, ...]] = []

    class Serving:
        async def stock(self, awaitable: Any, request: Any, raw: Any) -> Any:  # noqa: ANN401
            seen.append((request, raw))
            return await awaitable

        clean_up = overlay.leaves_to_route(stock)

    async def answer() -> str:
        return "answer"

    async def test() -> None:
        if not watched:
            assert await Serving().clean_up(answer(), "request", raw="raw") == "answer"
            return
        with open_exchange():
            assert await Serving().clean_up(answer(), "request", raw="raw") == "answer"

    asyncio.run(test())
    assert seen == ([] if watched else [("request", "raw")])


@pytest.mark.parametrize("connector", ["NixlConnector", "NixlPullConnector"])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_parameters_that_nixl_cannot_use_are_named(endpoint: str, connector: str) -> None:
    async def test() -> None:
        async with serving(connector=connector) as server:
            params = {**REMOTE, "dcp_size": "x"}  # as only this release looks at
            answer = await server.post(endpoint, body(endpoint, params))
            assert answer.status == 400
            assert "kv_transfer_params.dcp_size" in answer.body.decode()
            assert server.core.admitted == []

    asyncio.run(test())


def test_of_another_connector_s_only_what_cannot_be_sent() -> None:
    async def test() -> None:
        path = "/v1/completions"
        async with serving(connector="MooncakeConnector") as server:
            served = await server.post(path, body(path, {"dcp_size": "x"}))
            assert served.status == 200
            refused = await server.post(path, body(path, {"deep": 2**70}))
            assert refused.status == 400
            assert len(server.core.requests) == 1

    asyncio.run(test())

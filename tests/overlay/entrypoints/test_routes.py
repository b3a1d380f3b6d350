"""Which routes watch for refusals, and what they watch: all of those that generate, no other."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.serving_app import ENDPOINTS, MAX_MODEL_LEN, REMOTE, body, serving
from vllm_overlay.entrypoints.rejection import KVTransferRoute

COMPLETIONS, CHAT, RESPONSES, MESSAGES, GENERATE = ENDPOINTS
COUNT = "/v1/messages/count_tokens"
ABORT = "/inference/v1/abort_requests"

WATCHED = {
    *ENDPOINTS,
    "/v1/chat/completions/batch",  # from 0.19.0 on
    "/cohere/v2/chat",  # on 0.33.0, where Cohere's package is installed
    "/invocations",
}
NOTHING_TO_REFUSE = {
    # No blocks of a prefill server are read for these.
    ABORT,
    COUNT,
    "/v1/responses/{response_id}/cancel",
    "/abort_requests",
    "/cohere/v2/chat/render",
    "/detokenize",
    "/generative_scoring",
    "/is_scaling_elastic_ep",
    "/ping",
    "/scale_elastic_ep",
    "/tokenize",
    "/v1/chat/completions/derender",
    "/v1/chat/completions/render",
    "/v1/completions/derender",
    "/v1/completions/render",
    "/v1/decisions",
    "/v1/messages/render",
    "/v1/responses/render",
    "/v1/systemone",
}


def routes_of(app: Any) -> Iterator[Any]:  # noqa: ANN401 - an application or a router
    """Every route; from FastAPI 0.137 on an included router stays one."""
    for route in app.routes:
        if (router := getattr(route, "original_router", None)) is not None:
            yield from routes_of(router)
        else:
            yield route


def test_every_route_is_watched_or_known_to_refuse_nothing() -> None:
    async def test() -> None:
        async with serving() as server:
            posts = {
                route.path: route
                for route in routes_of(server.app)
                if "POST" in (getattr(route, "methods", None) or ())
            }
            assert set(ENDPOINTS) | {"/invocations"} <= posts.keys()
            assert posts.keys() <= WATCHED | NOTHING_TO_REFUSE, "a new one: does it generate?"
            watched = {
                path
                for path, route in posts.items()
                if isinstance(route, KVTransferRoute) and route.generates
            }
            assert watched == posts.keys() & WATCHED

    asyncio.run(test())


@pytest.mark.parametrize("path", sorted(WATCHED))
def test_what_generates_is_watched_where_it_is_installed(path: str) -> None:
    assert KVTransferRoute(path, lambda: None).generates


@pytest.mark.parametrize(
    ("path", "changes"),
    [
        (COUNT, {"model": "no-such"}),
        (COUNT, {"messages": "nonsense"}),
        (ABORT, {}),
        (ABORT, {"request_ids": None}),
        ("/v1/responses/resp_x/cancel", {}),
        ("/tokenize", {"model": "no-such"}),
        ("/v1/completions/render", {"model": "no-such"}),
        ("/ping", {}),
    ],
)
def test_a_refusal_that_refuses_no_read(path: str, changes: dict[str, Any]) -> None:
    async def test() -> None:
        async with serving() as server:
            await server.post(path, body(MESSAGES, **changes))
            assert server.core.requests == []

    asyncio.run(test())


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE"])
def test_a_method_that_does_not_exist(method: str) -> None:
    async def test() -> None:
        async with serving() as server:
            answer = await server.post(COMPLETIONS, body(COMPLETIONS), method=method)
            assert answer.status == 405
            assert server.core.requests == []

    asyncio.run(test())


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_what_sagemaker_sends(path: str) -> None:
    async def test() -> None:
        async with serving() as server:
            served = await server.post("/invocations", body(path))
            assert served.status == 200
            assert len(server.core.readers) == 1 and server.core.told == []
            refused = await server.post("/invocations", body(path, max_tokens=MAX_MODEL_LEN + 1))
            assert refused.status == 400
            assert server.core.told == [REMOTE]

    asyncio.run(test())

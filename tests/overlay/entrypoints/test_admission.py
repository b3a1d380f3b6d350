"""When P is not to be told: the request is served, or nobody on P waits for it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from vllm.engine.protocol import EngineClient

from tests.support.serving_app import ENDPOINTS, REMOTE, body, serving

COMPLETIONS, CHAT, RESPONSES, MESSAGES, _ = ENDPOINTS


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("endpoint", [COMPLETIONS, CHAT, RESPONSES, MESSAGES])
def test_a_request_that_is_served_is_not_told(endpoint: str, stream: bool) -> None:
    async def test() -> None:
        async with serving() as server:
            answer = await server.post(endpoint, body(endpoint, stream=stream))
            assert answer.status == 200
            assert server.core.told == []
            assert len(server.core.admitted) == 1

    asyncio.run(test())


@pytest.mark.parametrize(
    ("connector", "params"),
    [
        (None, REMOTE),
        ("NixlConnector", None),
        ("NixlConnector", {**REMOTE, "do_remote_prefill": False}),
    ],
)
def test_where_nothing_waits_nothing_is_told(connector: str | None, params: object) -> None:
    async def test() -> None:
        async with serving(connector=connector) as server:
            await server.post(COMPLETIONS, body(COMPLETIONS, params, model="no-such-model"))
            assert server.core.requests == []

    asyncio.run(test())


def test_an_engine_client_of_somebody_else_goes_on_working() -> None:
    """One that does not know about rejections can be built; it cannot tell anybody."""
    abstract = EngineClient.__abstractmethods__ - {"notify_kv_transfer_request_rejected"}
    theirs: Any = type("Theirs", (EngineClient,), dict.fromkeys(abstract))
    missing = None
    try:
        client = theirs()
    except TypeError as error:
        missing = str(error)
    assert missing is None
    notify = getattr(client, "notify_kv_transfer_request_rejected", None)
    assert notify is not None
    asyncio.run(notify("request", REMOTE))

"""41269: a request that D's handler or input processor rejects frees P's blocks at once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.idle_engine import IdleEngine
from tests.support.nixl_worker import connect, nixl_of
from tests.support.serving_app import ENDPOINTS, MAX_MODEL_LEN, REMOTE, body, serving

COMPLETIONS, CHAT, RESPONSES, MESSAGES, _ = ENDPOINTS
TOO_LONG = "x" * (MAX_MODEL_LEN + 1)


@pytest.mark.parametrize(
    ("endpoint", "changes"),
    [
        *((endpoint, {"model": "no-such-model"}) for endpoint in list(ENDPOINTS)[:4]),
        (COMPLETIONS, {"prompt": TOO_LONG}),
        (CHAT, {"messages": [{"role": "user", "content": TOO_LONG}]}),
        (RESPONSES, {"input": TOO_LONG}),
        (COMPLETIONS, {"max_tokens": MAX_MODEL_LEN + 1}),  # the prompt itself was fine for P
        (CHAT, {"temperature": -1.0}),
        (COMPLETIONS, {"logit_bias": {"999999": 1.0}}),
        (CHAT, {"structured_outputs": {"regex": "(("}}),
    ],
)
def test_a_rejected_request_is_told_to_p(endpoint: str, changes: dict[str, Any]) -> None:
    async def test() -> None:
        async with serving() as server:
            answer = await server.post(endpoint, body(endpoint, **changes))
            assert answer.status >= 400
            assert server.core.told == [REMOTE]
            assert server.core.admitted == []

    asyncio.run(test())


def test_p_hears_it_from_the_next_step_of_the_engine() -> None:
    """From the client's request to the bytes that free the blocks on P."""

    async def rejected() -> list[Any]:
        async with serving() as server:
            await server.post(COMPLETIONS, body(COMPLETIONS, model="no-such-model"))
            return server.core.requests

    engine = IdleEngine()
    connect(engine.worker, REMOTE["remote_engine_id"])
    for request in asyncio.run(rejected()):
        engine.add(request)
    assert engine.run()
    assert nixl_of(engine.worker).heard == {"engine-p/0": [b"cmpl-p-0:1"]}
    assert not engine.scheduler.requests

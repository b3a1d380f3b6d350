"""40986: a request that fails before its first token is answered as one that has failed.

With `kv_load_failure_policy` "fail" that is what becomes of a request whose KV cannot be read.
"""

from __future__ import annotations

import asyncio
import json

import pytest
from vllm.v1.engine import EngineCoreRequest

from tests.support.release import since
from tests.support.serving_app import ENDPOINTS, Answer, body, serving

COMPLETIONS, CHAT, _, MESSAGES, GENERATE = ENDPOINTS


def failed(endpoint: str, **changes: object) -> Answer:
    """What a client gets of a request that fails."""

    async def visit() -> Answer:
        async with serving() as server:
            server.core.answers = False

            async def fail(request: EngineCoreRequest) -> None:
                asyncio.get_running_loop().call_soon(server.core.fail, request)

            server.core.on_add = fail
            return await server.post(endpoint, body(endpoint, **changes))

    return asyncio.run(asyncio.wait_for(visit(), 60))


@pytest.mark.parametrize("changes", [{}, {"n": 2}], ids=str)
@pytest.mark.parametrize("endpoint", [COMPLETIONS, CHAT])
def test_a_stream_ends_with_an_error(endpoint: str, changes: dict[str, int]) -> None:
    answer = failed(endpoint, stream=True, **changes)
    assert answer.error.get("code") == 500
    assert answer.body.endswith(b"data: [DONE]\n\n")


def test_messages_do_not_end_as_if_all_were_said() -> None:
    answer = failed(MESSAGES, stream=True)
    events = [
        json.loads(line.removeprefix(b"data: "))
        for line in answer.body.splitlines()
        if line.startswith(b"data: {")
    ]
    assert "error" in [event.get("type") for event in events]
    assert b"end_turn" not in answer.body


if not since("0.29.0"):

    def test_the_token_level_endpoint_answers_with_an_error() -> None:
        answer = failed(GENERATE)
        assert answer.status == 500
        assert answer.error

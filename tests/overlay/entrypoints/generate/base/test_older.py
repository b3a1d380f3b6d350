"""Of the two places for parameters that a token-level request has, its handler's one counts.

What /v1/messages makes of a refusal is in test_rejection_proof.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from tests.support.release import since
from tests.support.serving_app import ENDPOINTS, REMOTE, body, serving

*_, GENERATE = ENDPOINTS
FIELD = since("0.29")
"""Whether the request's field goes first; up to 0.28.0 it counts where it is alone (42644)."""
BAD = {**REMOTE, "remote_port": "x"}


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("field", "sampling", "refused"),
    [(BAD, None, True), (BAD, REMOTE, FIELD), (REMOTE, BAD, not FIELD)],
)
def test_what_the_handler_ignores_refuses_nothing(
    field: object, sampling: object, refused: bool, stream: bool
) -> None:
    async def test() -> None:
        async with serving() as server:
            request = body(GENERATE, sampling, kv_transfer_params=field, stream=stream)
            answer = await server.post(GENERATE, request)
            assert answer.status == (400 if refused else 200)
            assert len(server.core.admitted) == (not refused)

    run(test())


@pytest.mark.parametrize("other", [None, {**REMOTE, "remote_request_id": "of another one"}])
def test_what_the_handler_ignores_is_told_to_nobody(other: object) -> None:
    async def test() -> None:
        async with serving() as server:
            request = body(GENERATE, other, kv_transfer_params=REMOTE, model="no-such")
            answer = await server.post(GENERATE, request)
            assert answer.status == 404
            assert server.core.told == [REMOTE if FIELD else other or REMOTE]

    run(test())

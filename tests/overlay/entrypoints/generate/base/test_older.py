"""Of the two places for parameters that a token-level request has, its handler's one counts.

What /v1/messages makes of a refusal is in test_rejection_proof.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.exceptions import EngineGenerateError

from tests.support.release import since
from tests.support.serving_app import ENDPOINTS, REMOTE, body, serving
from vllm_overlay.v1.engine.admission import open_exchange

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


def caused_by(cause: BaseException | None) -> EngineGenerateError:
    error = EngineGenerateError()
    error.__cause__ = cause
    return error


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (None, False),
        (ValueError("no"), True),
        (RuntimeError("a fault"), False),
        (caused_by(ValueError("no")), True),
        (caused_by(None), False),
    ],
)
def test_a_route_that_watches_learns_what_the_handler_refused(
    error: Exception | None, refused: bool, watched: bool
) -> None:
    overlay = pytest.importorskip(
        "vllm_overlay.entrypoints.generate.base.older", reason="0.24.0 to 0.28.0"
    )
    cleaned: list[tuple[object, ...]] = []

    async def clean_up(self: object, awaitable: Any, request: object, raw: object) -> object:  # noqa: ANN401
        cleaned.append((request, raw))
        return await awaitable

    def create_error_response(raised: Exception) -> Any:  # noqa: ANN401
        code = {ValueError: 400, RuntimeError: 500}[type(raised)]
        return SimpleNamespace(error=SimpleNamespace(code=code))

    async def answer() -> str:
        if error is not None:
            raise error
        return "answer"

    async def handle() -> None:
        handler = SimpleNamespace(create_error_response=create_error_response)
        handling = overlay.tells_route(clean_up)(handler, answer(), "request", raw="raw")
        if error is None:
            assert await handling == "answer"
            return
        with pytest.raises(type(error)) as raised:
            await handling
        assert raised.value is error

    async def test() -> None:
        if not watched:
            await handle()
            return
        with open_exchange() as exchange:
            await handle()
        assert exchange.refused is refused

    run(test())
    assert cleaned == ([] if watched else [("request", "raw")])

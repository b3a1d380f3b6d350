"""K05: every refusal for good frees P, however it comes about; nothing is told after admission."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from vllm.v1.engine import EngineCoreRequest

from tests.support.harness import HarnessError
from tests.support.idle_engine import IdleCore, IdleEngine, wait_for
from tests.support.nixl_worker import nixl_of, register_peer, script_handshake
from tests.support.serving_app import ENDPOINTS, REMOTE, body, serving

COMPLETIONS, CHAT, RESPONSES, _, GENERATE = ENDPOINTS


def assert_told_once(endpoint: str, **changes: Any) -> None:  # noqa: ANN401 - any field
    """P hears of a request that D does not accept."""

    async def test() -> None:
        async with serving() as server:
            answer = await server.post(endpoint, body(endpoint, **changes))
            assert answer.status >= 400 or answer.error
            assert server.core.admitted == []
            assert server.core.told == [REMOTE]

    asyncio.run(test())


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_body_that_does_not_validate(endpoint: str) -> None:
    assert_told_once(endpoint, model=7)


@pytest.mark.parametrize("endpoint", [COMPLETIONS, CHAT])
def test_a_stream_that_is_rejected_before_admission(endpoint: str) -> None:
    assert_told_once(endpoint, stream=True, logit_bias={"999999": 1.0})


@pytest.mark.parametrize("stream", [False, True])
def test_the_token_level_endpoint(stream: bool) -> None:
    assert_told_once(GENERATE, stream=stream, model="no-such-model")


def test_a_rank_that_does_not_exist() -> None:
    async def test() -> None:
        for stream in (False, True):
            async with serving(ranks=2) as server:
                header = [("X-data-parallel-rank", "7")]
                await server.post(COMPLETIONS, body(COMPLETIONS, stream=stream), headers=header)
                assert server.core.admitted == []
                assert server.core.told == [REMOTE]

    asyncio.run(test())


@pytest.mark.parametrize("endpoint", [COMPLETIONS, CHAT, RESPONSES])
def test_nothing_is_told_after_admission(endpoint: str) -> None:
    """The engine aborts the request that the client left, and answers for its blocks."""
    rejected = {**REMOTE, "remote_request_id": "cmpl-rejected"}

    async def test() -> None:
        async with serving() as server:
            await server.post(endpoint, body(endpoint, rejected, model=7))
            server.core.answers = False
            added = asyncio.Event()

            async def note(request: EngineCoreRequest) -> None:
                asyncio.get_running_loop().call_later(0.02, added.set)

            server.core.on_add = note
            await server.post(endpoint, body(endpoint), leaves=added.wait())
            await server.settled()
            assert len(server.core.aborted) == 1
            assert server.core.told == [rejected]

    asyncio.run(test())


def test_two_rejections_under_one_name_are_two_to_the_engine() -> None:
    async def test() -> None:
        async with serving() as server:
            for _ in range(2):
                await server.post(CHAT, body(CHAT, model=7, request_id="mine"))
            assert len({request.request_id for request in server.core.requests}) == 2

    asyncio.run(test())


def test_an_idle_engine_goes_on_until_p_has_been_told() -> None:
    """D meets this P for the first time, and has nothing else to do while they shake hands."""
    engine = IdleEngine()
    met = threading.Event()

    def shake_hands(engine_id: str, tp_size: int) -> dict[int, str]:
        if not met.wait(10):
            raise HarnessError("nobody let the handshake go on for 10 s", "`met.set()`")
        return register_peer(engine.worker, engine_id, tp_size)

    def leave() -> None:
        engine.ask("left", range(20), [[1, 2]])
        engine.abort("left")

    script_handshake(engine.worker, shake_hands)
    with IdleCore(engine) as idle:
        idle.call(leave)
        idle.comes_to(lambda: idle.steps > 3)
        met.set()
        idle.comes_to(lambda: nixl_of(engine.worker).heard)
        assert nixl_of(engine.worker).heard == {"P/0": [b"left-at-p:1"]}
        assert wait_for(lambda: idle.core.input_queue.is_all), "it takes steps for nothing"

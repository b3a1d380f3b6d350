"""A request that D refused and that comes again, put right: never read, whichever core it meets."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore

from tests.support.idle_engine import IdleEngine
from tests.support.nixl_worker import connect, nixl_of
from tests.support.serving_app import ENDPOINTS, REMOTE, body, serving

COMPLETIONS = next(iter(ENDPOINTS))
OFFER = {**REMOTE, "remote_block_ids": [[1]]}


def engine() -> IdleEngine:
    """An engine core that knows P."""
    made = IdleEngine()
    connect(made.worker, REMOTE["remote_engine_id"])
    return made


def requests(*changes: dict[str, Any]) -> list[EngineCoreRequest]:
    """What an API server sends its engine core for these requests, which name the same blocks."""

    async def posted() -> list[EngineCoreRequest]:
        async with serving() as server:
            for change in changes:
                await server.post(COMPLETIONS, body(COMPLETIONS, OFFER, **change))
            return list(server.core.requests)

    return asyncio.run(posted())


def serve(core: IdleEngine) -> list[bytes]:
    """Step with reads that complete until all is done; what P has heard."""
    nixl = nixl_of(core.worker)
    for _ in range(20):
        core.step()
        nixl.finish(*nixl.in_flight())
    assert not core.scheduler.requests
    return nixl.heard["engine-p/0"]


@pytest.mark.parametrize("steps", [0, 3])
def test_to_the_same_engine_core(steps: int) -> None:
    stand_in, again = requests({"model": "no-such-model"}, {})
    core = engine()
    core.add(stand_in)
    for _ in range(steps):
        core.step()
    core.add(again)
    assert serve(core) == [b"cmpl-p-0:1"]
    assert nixl_of(core.worker).reads == []


def test_while_the_right_one_is_served() -> None:
    """Refusals of a second copy say nothing: the first one answers for the blocks."""
    first, stand_in = requests({}, {"model": "no-such-model"})
    core = engine()
    core.add(first)
    core.step()
    core.add(stand_in)
    core.step()
    nixl = nixl_of(core.worker)
    assert len(nixl.reads) == 1
    assert nixl.heard == {}
    assert len(serve(core)) == 1


def test_to_another_engine_core_of_the_same_api() -> None:
    stand_in, again = requests({"model": "no-such-model"}, {})
    cores = [engine(), engine()]
    claim = (OFFER["remote_engine_id"], OFFER["remote_request_id"], stand_in.request_id)
    for core in cores:
        asked: Any = core
        assert EngineCore.claim_kv_transfer(asked, *claim)
    cores[0].add(stand_in)
    cores[1].add(again)
    assert serve(cores[0]) == [b"cmpl-p-0:1"]
    assert serve(cores[1]) == []
    assert nixl_of(cores[1].worker).reads == []
    assert not EngineCore.claim_kv_transfer(asked, *claim[:2], "another stand-in")

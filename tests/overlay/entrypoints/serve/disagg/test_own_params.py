"""A token-level request's own parameters: handed on, for whom, and what refusals make of them."""

from __future__ import annotations

import asyncio
import copy
import functools
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.sampling_params import SamplingParams

from tests.support.serving_app import REMOTE, Answer, ScriptedCore, body, serving
from vllm_overlay.entrypoints.serve.disagg.api_router import TokensRoute

own_params = pytest.importorskip(
    "vllm_overlay.entrypoints.serve.disagg.own_params", reason="up to 0.28.0"
)

GENERATE = "/inference/v1/generate"
OTHERS = {**REMOTE, "remote_request_id": "of another one"}
KEY = "kv_transfer_params"


def handled(own: object, extra: Any, connector: str | None = "NixlConnector") -> Any:  # noqa: ANN401
    """The `extra_args` that the handler of a request sees."""
    config = connector and KVTransferConfig(kv_connector=connector, kv_role="kv_both")
    engine = SimpleNamespace(vllm_config=SimpleNamespace(kv_transfer_config=config or None))
    app = SimpleNamespace(state=SimpleNamespace(engine_client=engine))
    request = SimpleNamespace(
        kv_transfer_params=own, sampling_params=SamplingParams(extra_args=extra)
    )

    async def generate(request: Any, raw_request: Any) -> Any:  # noqa: ANN401
        assert raw_request.scope["app"] is app
        return request.sampling_params.extra_args

    raw: Any = SimpleNamespace(scope={"app": app})
    taken = own_params.takes_own_params(generate)
    return asyncio.run(taken(request=request, raw_request=raw))


@pytest.mark.parametrize(
    ("own", "extra", "seen"),
    [
        (REMOTE, None, {KEY: REMOTE}),
        (REMOTE, {"other": 1}, {"other": 1, KEY: REMOTE}),
        (REMOTE, {KEY: None}, {KEY: REMOTE}),
        (REMOTE, {KEY: OTHERS}, {KEY: OTHERS}),
        (REMOTE, {KEY: {}}, {KEY: {}}),
        ({}, None, None),
        ({}, {KEY: None}, {KEY: None}),
        (None, None, None),
        (None, {KEY: REMOTE}, {KEY: REMOTE}),
        (None, {}, {}),
    ],
)
def test_they_go_where_the_handler_looks(own: object, extra: object, seen: object) -> None:
    before = copy.deepcopy(extra)
    assert handled(own, extra) == seen
    assert extra == before


@pytest.mark.parametrize("connector", ["MooncakeConnector", "NixlPushConnector", None])
def test_who_does_not_pull_over_nixl_gets_what_it_got(connector: str | None) -> None:
    assert handled(REMOTE, None, connector) is None


def test_the_route_knows_whatever_is_around_the_endpoint() -> None:
    async def generate(request: object, raw_request: object) -> None: ...

    @functools.wraps(taken := own_params.takes_own_params(generate))
    async def around(*args: object) -> None: ...

    for endpoint, params in ((generate, None), (taken, REMOTE), (around, REMOTE)):
        assert TokensRoute("/", endpoint).transfer_params({KEY: REMOTE}) == params


def visited(own: object, **changes: object) -> tuple[Answer, ScriptedCore]:
    """What a client and the engine core see of a request with parameters of its own."""

    async def visit() -> tuple[Answer, ScriptedCore]:
        async with serving() as server:
            request = body(GENERATE, None, **{"extra_args": None, KEY: own, **changes})
            return await server.post(GENERATE, request), server.core

    return asyncio.run(asyncio.wait_for(visit(), 60))


@pytest.mark.parametrize(
    "changes", [{"model": "no-such-model"}, {"token_ids": "x"}, {"top_p": 2.0}], ids=str
)
def test_a_refusal_tells_p(changes: dict[str, object]) -> None:
    answer, core = visited(REMOTE, **changes)
    assert 400 <= answer.status < 500
    assert core.told == [REMOTE] and not core.admitted


def test_a_request_that_is_served_tells_nobody() -> None:
    answer, core = visited(REMOTE)
    assert answer.status == 200
    assert len(core.readers) == 1 and not core.told


def test_parameters_that_nixl_cannot_use_are_refused() -> None:
    answer, core = visited({**REMOTE, "remote_port": "x"})
    assert answer.status == 400
    assert "kv_transfer_params.remote_port" in answer.error["message"]
    assert not core.admitted


@pytest.mark.parametrize("own", [7, "x", [REMOTE]], ids=str)
def test_what_is_no_object_is_the_release_s_own_refusal(own: object) -> None:
    answer, core = visited(own)
    assert answer.status == 400
    assert not core.requests

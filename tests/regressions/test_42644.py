"""42644: what a token-level request has in its own `kv_transfer_params` is what the engine gets.

The other endpoints have such a field too, and a router fills it there.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from vllm.v1.engine import EngineCoreRequest

from tests.support.serving_app import REMOTE, Answer, ScriptedCore, body, serving

GENERATE = "/inference/v1/generate"
KEEP: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}


def request_of(params: object, **changes: object) -> dict[str, Any]:
    """A token-level request with parameters in its own field, and none elsewhere."""
    return body(GENERATE, None, **{"extra_args": None, "kv_transfer_params": params, **changes})


def asked(
    request: dict[str, Any], offered: dict[str, Any] | None = None
) -> tuple[Answer, ScriptedCore]:
    """The answer to a request, and the engine core that was sent it; P's has blocks to offer."""

    async def visit() -> tuple[Answer, ScriptedCore]:
        async with serving() as server:
            core = server.core

            async def finish(request: EngineCoreRequest) -> None:
                asyncio.get_running_loop().call_soon(core.finish, request, None, offered)

            core.answers, core.on_add = False, finish
            return await server.post(GENERATE, request), core

    return asyncio.run(asyncio.wait_for(visit(), 60))


def params_of(core: ScriptedCore) -> list[object]:
    """The parameters of each request that the engine core was sent."""
    sampled = [request.sampling_params for request in core.admitted]
    return [one and (one.extra_args or {}).get("kv_transfer_params") for one in sampled]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("params", [KEEP, REMOTE], ids=["to P", "to D"])
def test_the_engine_gets_them(params: dict[str, Any], stream: bool) -> None:
    answer, core = asked(request_of(params, stream=stream))
    assert answer.status == 200
    assert params_of(core) == [params]


def test_what_else_the_engine_is_told_stays() -> None:
    answer, core = asked(request_of(KEEP, extra_args={"kv_transfer_params": None, "other": 1}))
    assert answer.status == 200
    sampling = core.admitted[0].sampling_params
    assert sampling is not None
    assert sampling.extra_args == {"kv_transfer_params": KEEP, "other": 1}


def test_p_s_answer_is_what_d_is_sent() -> None:
    """As a router goes about it: P keeps the blocks that it is asked for, and D is told of them."""
    kept, p = asked(request_of(KEEP), REMOTE)
    _, d = asked(request_of(json.loads(kept.body)["kv_transfer_params"]))
    assert [len(p.admitted), len(d.readers)] == [1, 1]
    assert params_of(p) == [KEEP]

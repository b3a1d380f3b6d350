"""Every endpoint of the API server: what it answers, and what the engine core is sent for it."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

from tests.parity.scenario import LeftOutError, Observed, scenario, scrubbed
from tests.parity.visits import CONNECTORS, OWN, seen, serving, visit
from tests.support.release import since
from tests.support.serving_app import ENDPOINTS, MAX_MODEL_LEN, MODEL, REMOTE, Server, body

CHAT = [{"role": "user", "content": "hi"}]
COMPLETIONS, RESPONSES = "/v1/completions", "/v1/responses"
TOKENS = "/inference/v1/generate"

OTHERS: dict[str, dict[str, Any]] = {
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [3, 4]},
    "/v1/messages/count_tokens": {"messages": CHAT},
    "/v1/completions/render": {"prompt": "hi"},
    "/v1/chat/completions/render": {"messages": CHAT},
    "/v1/messages/render": {"messages": CHAT, "max_tokens": 2},
    "/v1/responses/render": {"input": "hi"},
    "/inference/v1/abort_requests": {"request_ids": ["cmpl-of-nobody"]},
    "/abort_requests": {"request_ids": ["cmpl-of-nobody"]},
}
"""Endpoints that take a prompt, or an id, and generate nothing: what they may be sent."""

BATCH = "/v1/chat/completions/batch"
SAGEMAKER = "/invocations"  # whatever an endpoint takes, by its form
GENERATING = (*ENDPOINTS, SAGEMAKER)
_CLOCKS = ("/metrics",)  # its body counts


def _request(path: str, **changes: Any) -> dict[str, Any]:  # noqa: ANN401 - any field
    """A body that `path` serves, where one is known; without transfer parameters."""
    if path in ENDPOINTS:
        return body(path, None, **changes)
    known = {**OTHERS, BATCH: {"messages": [CHAT, CHAT]}, SAGEMAKER: {"prompt": "hi"}}
    return {"model": MODEL, **known.get(path, {}), **changes}


def _paths(server: Server) -> dict[str, list[str]]:
    """Each path that the application says it has, with its methods; ids in paths are nobody's."""
    described = server.app.openapi()["paths"]
    return {
        path.replace("{response_id}", "resp_nobody"): sorted(methods)
        for path, methods in described.items()
        if "{" not in path.replace("{response_id}", "")
    }


BODIES: dict[str, Callable[[str], bytes]] = {
    "served": lambda path: json.dumps(_request(path)).encode(),
    "streamed": lambda path: json.dumps(_request(path, stream=True)).encode(),
    "no object": lambda path: b"[1, 2]",
    "empty object": lambda path: b"{}",
    "no JSON": lambda path: b'{"model": ',
    "nothing": lambda path: b"",
    "no Unicode": lambda path: b'{"model": "\xff\xfe"}',
    "other model": lambda path: json.dumps(_request(path, model="no-such-model")).encode(),
    "negative temperature": lambda path: json.dumps(_request(path, temperature=-1.0)).encode(),
    "UTF-16": lambda path: json.dumps(_request(path)).encode("utf-16"),
    "fields of no endpoint": lambda path: json.dumps(
        {"sampling_params": {"temperature": 0.5}, "request": [], "engine": None} | _request(path)
    ).encode(),
    "deep": lambda path: json.dumps(_request(path)).encode()[:-1]
    + b', "metadata": ' + b"[" * 200 + b"]" * 200 + b"}",
    "big": lambda path: json.dumps(_request(path, user="x" * 2_000_000)).encode(),
    "long prompt": lambda path: json.dumps(
        {**_request(path), "prompt": "x" * 500_000, "input": "x" * 500_000}
    ).encode(),
}  # fmt: skip
"""Bodies of requests for which nobody waits, by what is particular about them."""


@scenario(*CONNECTORS)
async def answers(connector: str) -> Observed:
    """Every route with every body, where no prefill server waits."""
    observed: dict[str, Observed] = {}
    async with serving(connector=connector) as server:
        for path, methods in _paths(server).items():
            for method in methods:
                if method != "post":
                    observed[f"{method} {path}"] = seen(
                        await visit(server, method.upper(), path), server.core
                    )
                    if path in _CLOCKS:
                        del observed[f"{method} {path}"]["body"]
                    continue
                for name, make in BODIES.items():
                    answer = await visit(server, "POST", path, make(path))
                    observed[f"{path}, {name}"] = seen(answer, server.core)
        wrong = await visit(server, "POST", COMPLETIONS, b"a=b", [("content-type", "text/plain")])
        observed["another content type"] = seen(wrong, server.core)
        observed["another method"] = seen(await visit(server, "PUT", COMPLETIONS), server.core)
        observed["another path"] = seen(await visit(server, "POST", "/v1/nothing"), server.core)
    return observed


@scenario(*CONNECTORS)
async def p_waits_and_the_request_is_served(connector: str) -> Observed:
    """The core is sent one request that reads, and nothing else."""
    observed: dict[str, Observed] = {}
    async with serving(connector=connector) as server:
        for path in (*ENDPOINTS, SAGEMAKER):
            for stream in (False, True):
                raw = json.dumps(_params_in(path, REMOTE) | ({"stream": True} if stream else {}))
                answer = await visit(server, "POST", path, raw.encode())
                observed[f"{path}, {stream=}"] = seen(answer, server.core)
    return observed


def _params_in(path: str, params: object, **changes: Any) -> dict[str, Any]:  # noqa: ANN401
    if path in ENDPOINTS:
        return body(path, params, **changes)
    return {**_request(path), "kv_transfer_params": params, **changes}


@scenario(*CONNECTORS)
async def p_waits_and_nothing_is_generated(connector: str) -> Observed:
    """An endpoint that generates nothing refuses no request, so it has nobody to tell."""
    observed: dict[str, Observed] = {}
    async with serving(connector=connector) as server:
        there = _paths(server)
        for path in OTHERS:
            if path not in there:
                continue
            known = _request(path) | {"kv_transfer_params": REMOTE}
            tokens = {"sampling_params": {"extra_args": {"kv_transfer_params": REMOTE}}}
            bodies = {
                "good": known,
                "parameters that nobody could use": known
                | {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "h"}},
                "a word of their name": known | {"kv_transfer_params": "x"},
                "without what it needs": {"model": MODEL, "kv_transfer_params": REMOTE},
                "other model": known | {"model": "no-such-model"},
                "parameters of a token-level request": _request(path) | tokens,
            }
            for name, one in bodies.items():
                answer = await visit(server, "POST", path, json.dumps(one).encode())
                observed[f"{path}, {name}"] = seen(answer, server.core)
        for path in ("/v1/responses/resp_nobody/cancel", "/v1/nothing"):
            raw = json.dumps({"kv_transfer_params": REMOTE}).encode()
            observed[path] = seen(await visit(server, "POST", path, raw), server.core)
    return observed


REFUSED: dict[str, dict[str, Any]] = {
    "other model": {"model": "no-such-model"},
    "a field of another type": {"max_tokens": "many", "max_output_tokens": "many", "model": [1]},
    "too many tokens": {"max_tokens": MAX_MODEL_LEN + 1, "max_output_tokens": -1},
}


@scenario(*CONNECTORS)
async def p_waits_and_the_request_is_refused(connector: str) -> Observed:
    """The answer is stock's; whoever is told on stock is told here, for NIXL others as well."""
    observed: dict[str, Observed] = {}
    may_tell = connector in OWN
    async with serving(connector=connector) as server:
        for path in GENERATING:
            for name, changes in REFUSED.items():
                good = _params_in(path, REMOTE)
                raw = json.dumps(good | changes).encode()
                answer = await visit(server, "POST", path, raw)
                observed[f"{path}, {name}"] = seen(answer, server.core, may_tell=may_tell)
            refused = _params_in(path, REMOTE, model="no-such-model")
            odd = {
                "UTF-16": json.dumps(refused).encode("utf-16"),
                "UTF-32": json.dumps(refused).encode("utf-32"),
                "escaped keys": json.dumps(refused)
                .replace("do_remote_prefill", "do_remote_prefil\\u006c")
                .replace("kv_transfer_params", "kv_tr\\u0061nsfer_params")
                .encode(),
            }
            for name, raw in odd.items():
                answer = await visit(server, "POST", path, raw)
                observed[f"{path}, {name}"] = seen(answer, server.core, may_tell=may_tell)
    return observed


@scenario(*OWN)
async def nobody_waits_and_the_request_is_refused(connector: str) -> Observed:
    """Parameters that ask for no blocks: of a prefill, of another connector, or none at all."""
    observed: dict[str, Observed] = {}
    given: dict[str, Any] = {
        "prefill": {"do_remote_decode": True, "do_remote_prefill": False},
        "nothing remote": {"do_remote_prefill": False},
        "empty": {},
        "other connector's": {"ret_first_tok": True, "transfer_id": "x"},
    }
    async with serving(connector=connector) as server:
        for path in ENDPOINTS:
            for name, params in given.items():
                good = json.dumps(_params_in(path, params)).encode()
                bad = json.dumps(_params_in(path, params, model="no-such-model")).encode()
                for outcome, raw in (("served", good), ("refused", bad)):
                    answer = await visit(server, "POST", path, raw)
                    observed[f"{path}, {name}, {outcome}"] = seen(answer, server.core)
    return observed


async def _own_params(connector: str, places: dict[str, tuple[object, object]]) -> Observed:
    """Token-level requests with parameters in their own field, and among their sampling ones."""
    observed: dict[str, Observed] = {}
    async with serving(connector=connector) as server:
        for name, (own, sampling) in places.items():
            for how in ({}, {"stream": True}, {"model": "no-such-model"}):
                changes = {"kv_transfer_params": own, "extra_args": sampling, **how}
                raw = json.dumps(body(TOKENS, None, **changes)).encode()
                answer = await visit(server, "POST", TOKENS, raw)
                may_tell = connector in OWN and answer.status != 200
                observed[f"{name}, {how}"] = seen(answer, server.core, may_tell=may_tell)
    return observed


_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
_EVERYWHERE: dict[str, tuple[object, object]] = {
    "the same twice": (REMOTE, {"kv_transfer_params": REMOTE}),
    "another's in the field": (
        {**REMOTE, "remote_request_id": "cmpl-p-1"},
        {"kv_transfer_params": REMOTE},
    ),
    "a prefill in the field": (_PREFILL, {"kv_transfer_params": REMOTE}),
    "nothing in the field": ({}, None),
    "nothing in the field, and more": ({}, {"other": 1}),
    "null in the field": (None, {"kv_transfer_params": REMOTE}),
    "no object": ([1], {"kv_transfer_params": REMOTE}),
}
_FIELD_ALONE: dict[str, tuple[object, object]] = {
    "of a decode": (REMOTE, None),
    "of a prefill": (_PREFILL, {"other": 1}),
    "of a prefill, null elsewhere": (_PREFILL, {"kv_transfer_params": None}),
}
if not since("0.29.0"):  # from there on the field goes first, and K04 refuses what stock trips over
    _EVERYWHERE["what nobody could use in the field"] = (
        {"do_remote_prefill": True, "remote_host": "h"},
        {"kv_transfer_params": REMOTE},
    )
    _FIELD_ALONE["what nobody could use"] = (
        {"do_remote_prefill": True, "remote_port": 2**70},
        None,
    )


@scenario(*CONNECTORS)
async def a_token_level_request_names_p_where_it_counts(connector: str) -> Observed:
    """What stands among the sampling parameters has always counted, whatever the field says."""
    return await _own_params(connector, _EVERYWHERE)


@scenario(*[name for name in CONNECTORS if name not in OWN])
async def a_token_level_request_names_p_in_its_field(connector: str) -> Observed:
    """Up to 0.28.0 nobody reads it there, and our fixes read it for NIXL that pulls."""
    return await _own_params(connector, _FIELD_ALONE)


@scenario("NixlConnector", shows={"K10": "each conversation reads the one request of P"})
async def p_waits_for_two_conversations(connector: str) -> Observed:
    """The batch of conversations, of which one at most may read."""
    async with serving(connector=connector) as server:
        if BATCH not in _paths(server):
            raise LeftOutError(f"this release has no {BATCH}")
        raw = json.dumps(_params_in(BATCH, REMOTE)).encode()
        return seen(await visit(server, "POST", BATCH, raw), server.core)


@scenario("MoRIIOConnector", "MooncakeConnector", "LMCacheConnectorV1", "NixlPushConnector")
async def one_request_becomes_several(connector: str) -> Observed:
    """On P and on D: of other connectors each of them names the transfer, as far as on stock."""
    observed: dict[str, Observed] = {}
    sampled, prompts = {"n": 2}, {"prompt": ["hi", "ho"]}
    async with serving(connector=connector) as server:
        for side, params in {"P": _PREFILL, "D": REMOTE}.items():
            given = {**params, "transfer_id": "x"}
            bodies = {
                "samples": (COMPLETIONS, _params_in(COMPLETIONS, given, **sampled)),
                "prompts": (COMPLETIONS, _params_in(COMPLETIONS, given, **prompts)),
                "both": (COMPLETIONS, _params_in(COMPLETIONS, given, **sampled, **prompts)),
                "conversations": (BATCH, _params_in(BATCH, given)),
            }
            for name, (path, one) in bodies.items():
                answer = await visit(server, "POST", path, json.dumps(one).encode())
                observed[f"{side}, {name}"] = seen(answer, server.core)
    return observed


@scenario(*OWN, "none")
async def a_client_without_the_key(connector: str) -> Observed:
    """Who is not let in gets the same answer, and makes this server say nothing to anybody."""
    observed: dict[str, Observed] = {}
    async with serving("--api-key", "secret", connector=connector) as server:
        for path in list(ENDPOINTS)[:4]:  # the others are not behind the key, on stock neither
            raw = json.dumps(_params_in(path, REMOTE, model="no-such-model")).encode()
            observed[path] = seen(await visit(server, "POST", path, raw), server.core)
            known = [("authorization", "Bearer secret")]
            raw = json.dumps(_params_in(path, REMOTE)).encode()
            answer = await visit(server, "POST", path, raw, known)
            observed[f"{path}, with the key"] = seen(answer, server.core)
    return observed


@scenario("NixlConnector", "none")
async def a_response_is_stored(connector: str) -> Observed:
    """A background response: made, asked for, cancelled."""
    observed: dict[str, Observed] = {}
    with mock.patch.dict(os.environ, {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}):
        async with serving(connector=connector) as server:
            for params in (None, REMOTE):
                for answers in (True, False):
                    server.core.answers = answers
                    name = f"{'P waits' if params else 'nobody waits'}, {answers=}"
                    good = body(RESPONSES, params, background=True, store=True)
                    made = await visit(server, "POST", RESPONSES, json.dumps(good).encode())
                    await asyncio.sleep(0.1)
                    made_id = json.loads(made.body).get("id")
                    path = f"{RESPONSES}/{made_id}"
                    got = await visit(server, "GET", path)
                    ended = await visit(server, "POST", f"{path}/cancel")
                    await asyncio.sleep(0.1)
                    observed[name] = {
                        "asked for": _without(made_id, got.body),
                        "cancelled": _without(made_id, ended.body),
                        "made": seen(made, server.core),
                    }
    return observed


def _without(made_id: str, raw: bytes) -> str:
    return scrubbed(raw.replace(made_id.encode(), b"ID"))

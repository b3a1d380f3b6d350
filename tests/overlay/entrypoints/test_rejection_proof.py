"""A refusal is proven, or nothing is told: retries, other engine clients, other bodies, no key."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Coroutine
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.engine.protocol import EngineClient
from vllm.v1.engine import EngineCoreRequest

from tests.support.release import since
from tests.support.serving_app import ENDPOINTS, MAX_MODEL_LEN, REMOTE, Server, body, serving
from tests.support.takers import TAKERS
from vllm_overlay.entrypoints import rejection
from vllm_overlay.v1.engine.admission import current_exchange

COMPLETIONS, CHAT, RESPONSES, MESSAGES, GENERATE = ENDPOINTS
HANDLERS = {
    COMPLETIONS: ("openai_serving_completion", "create_completion"),
    CHAT: ("openai_serving_chat", "create_chat_completion"),
    RESPONSES: ("openai_serving_responses", "create_responses"),
    GENERATE: ("serving_tokens", "serve_tokens"),
}
SAYS_SO = since("0.28")
"""Whether /v1/messages answers a refusal of its handler with a 400, as the other endpoints."""
FINAL = [400, 404, 422]
RETRIED = [429, 500, 503]


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


# ---------------------------------------------------------------- what asks for a retry


@pytest.mark.parametrize("status", [*FINAL, *RETRIED])
@pytest.mark.parametrize("endpoint", HANDLERS)
def test_an_error_answer(endpoint: str, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with serving() as server:
            name, method = HANDLERS[endpoint]
            handler = getattr(server.app.state, name)

            async def refuse(*args: object) -> object:
                return handler.create_error_response("no", "No", HTTPStatus(status))

            monkeypatch.setattr(handler, method, refuse)
            answer = await server.post(endpoint, body(endpoint))
            assert answer.status == status
            assert server.core.told == [REMOTE] * (status in FINAL)

    run(test())


@pytest.mark.parametrize("status", [*FINAL, *RETRIED])
@pytest.mark.parametrize("endpoint", HANDLERS)
def test_a_stream_that_begins_with_an_error(
    endpoint: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with serving() as server:
            name, method = HANDLERS[endpoint]

            async def events() -> AsyncIterator[Any]:
                error = {"error": {"message": "no", "code": status}}
                if endpoint == RESPONSES:  # its events are objects
                    yield SimpleNamespace(model_dump_json=lambda **_: json.dumps(error))
                else:
                    yield f"data: {json.dumps(error)}\n\n"
                    yield "data: [DONE]\n\n"

            async def refuse(*args: object) -> object:
                return events()

            monkeypatch.setattr(getattr(server.app.state, name), method, refuse)
            answer = await server.post(endpoint, body(endpoint, stream=True))
            assert answer.status == 200
            assert server.core.told == [REMOTE] * (status in FINAL)

    run(test())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("error", [ValueError, RuntimeError])
def test_a_refusal_that_is_answered_as_a_fault(
    error: type[Exception], stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stock tells P of both from 0.21.0 to 0.27.1. The first would be refused by every server; the
    second may be served by another one, which has to find the blocks. Before 0.21 P holds both."""

    async def test() -> None:
        async with serving() as server:
            handler = server.app.state.anthropic_serving_messages

            async def fail(*args: object, **kwargs: object) -> object:
                raise error("no")

            monkeypatch.setattr(handler, "_check_model", fail)
            answer = await server.post(MESSAGES, body(MESSAGES, stream=stream))
            assert answer.status == (400 if SAYS_SO and error is ValueError else 500)
            final = error is ValueError and since("0.21")
            assert server.core.told == [REMOTE] * final

    run(test())


# ---------------------------------------------------------------- what served


@pytest.mark.parametrize("endpoint", [COMPLETIONS, CHAT])
def test_a_beam_search_served(endpoint: str) -> None:
    """Its beams read nothing, and the prefill server's lease ends, as without any of this."""

    async def test() -> None:
        async with serving() as server:
            answer = await server.post(endpoint, body(endpoint, use_beam_search=True, n=2))
            assert answer.status == 200
            assert server.core.readers == server.core.told == []

    run(test())


class Elsewhere:
    """An engine client whose requests are sent by one task, as by another process.

    The task is begun by the first request, and so in that one's context.
    """

    def __init__(self, engine: Any) -> None:  # noqa: ANN401 - an engine client
        self.engine = engine
        self.queue: asyncio.Queue[Any] = asyncio.Queue()
        self.task: asyncio.Task[None] | None = None

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self.engine, name)

    async def work(self) -> None:
        while True:
            call, outputs = await self.queue.get()
            try:
                async for output in call():
                    outputs.put_nowait(output)
                outputs.put_nowait(None)
            except Exception as error:
                outputs.put_nowait(error)

    async def generate(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:  # noqa: ANN401
        if self.task is None:
            self.task = asyncio.create_task(self.work())
        outputs: asyncio.Queue[Any] = asyncio.Queue()
        self.queue.put_nowait((lambda: self.engine.generate(*args, **kwargs), outputs))
        while (output := await outputs.get()) is not None:
            if isinstance(output, Exception):
                raise output
            yield output


def use(server: Server, client: Any) -> None:  # noqa: ANN401 - an engine client
    """Have the whole application use another engine client."""
    server.app.state.engine_client = client
    for handler in vars(server.app.state)["_state"].values():
        if hasattr(handler, "engine_client"):
            handler.engine_client = client


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("first", ["served", "refused"])
@pytest.mark.parametrize("endpoint", TAKERS)
def test_an_engine_client_that_sends_from_a_task_of_its_own(
    endpoint: str, first: str, stream: bool
) -> None:
    """What it serves is read and not told, whatever became of the request that it began with."""
    other = {**REMOTE, "remote_request_id": "another"}

    async def test() -> None:
        async with serving() as server:
            client = Elsewhere(server.engine)
            use(server, client)
            refused = first == "refused"
            if refused:  # by the engine's input processor
                request = body(COMPLETIONS, other, logit_bias={"999999": 1.0})
                await server.post(COMPLETIONS, request)
                assert server.core.told == [other]
            for _ in range(2):
                answer = await server.post(endpoint, body(endpoint, stream=stream))
                assert answer.status == 200 and not answer.error
            assert len(server.core.readers) == 2
            assert server.core.told == [other] * refused
            assert client.task is not None
            client.task.cancel()

    run(test())


def test_an_engine_client_that_cannot_tell_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    abstract = EngineClient.__abstractmethods__
    asked: list[object] = []

    async def test() -> None:
        async with serving() as server:

            class Theirs(EngineClient):
                vllm_config = server.engine.vllm_config
                model_config = server.engine.model_config
                renderer = server.engine.renderer
                errored = False

            for name in abstract - vars(Theirs).keys():
                setattr(Theirs, name, lambda self, *args, **kwargs: None)
            Theirs.__abstractmethods__ = frozenset()
            use(server, Theirs())
            monkeypatch.setattr("vllm_overlay.engine.protocol.logger.warning", asked.append)
            for endpoint in ENDPOINTS:
                answer = await server.post(endpoint, body(endpoint, model="no-such"))
                assert answer.status == 404
            assert asked == []

    run(test())


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_an_engine_client_that_knows_nothing_of_it(
    endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with serving() as server:
            use(server, SimpleNamespace(vllm_config=server.engine.vllm_config, errored=False))
            answer = await server.post(endpoint, body(endpoint, model="no-such"))
            assert answer.status == 404

    run(test())


# ---------------------------------------------------------------- how a body spells it


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-8-sig"])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_body_in_another_encoding(endpoint: str, encoding: str) -> None:
    async def test() -> None:
        async with serving() as server:
            raw = json.dumps(body(endpoint, model="no-such")).encode(encoding)
            answer = await server.post(endpoint, raw)
            assert answer.status == 404
            assert server.core.told == [REMOTE]

    run(test())


@pytest.mark.parametrize("spelled", ["do_remote\\u005fprefill", "\\u0064o_remote_prefill"])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_key_that_is_escaped(endpoint: str, spelled: str) -> None:
    async def test() -> None:
        async with serving() as server:
            raw = json.dumps(body(endpoint, model="no-such")).replace("do_remote_prefill", spelled)
            answer = await server.post(endpoint, raw.encode())
            assert answer.status == 404
            assert server.core.told == [REMOTE]

    run(test())


# ---------------------------------------------------------------- one set of parameters

OTHER = {**REMOTE, "remote_request_id": "another"}
SPOILT: dict[str, Any] = {**REMOTE, "remote_block_ids": "none"}
NAMES: list[tuple[object, object]] = [
    # in the sampling parameters, and at the top
    (REMOTE, None),
    (None, REMOTE),
    (REMOTE, OTHER),
    (OTHER, REMOTE),
    (REMOTE, {}),
    ({}, REMOTE),
    (REMOTE, {"do_remote_prefill": False}),
    ({"do_remote_prefill": False}, REMOTE),
    (SPOILT, None),
    (None, SPOILT),
    (REMOTE, SPOILT),
    (SPOILT, REMOTE),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("inner", "top"), NAMES)
def test_token_level_parameters_are_one_set(inner: object, top: object, stream: bool) -> None:
    """What the handler uses decides what is checked, and it is what is told."""

    async def test() -> None:
        async with serving() as server:
            request = body(GENERATE, inner, stream=stream)
            if inner is None:
                del request["sampling_params"]["extra_args"]
            if top is not None:
                request["kv_transfer_params"] = top
            reads: list[object] = []

            async def note(sent: EngineCoreRequest) -> None:
                assert sent.sampling_params is not None
                reads.append((sent.sampling_params.extra_args or {}).get("kv_transfer_params"))

            # What the handler uses, seen where nobody checks.
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(server.app.state.serving_tokens, "_check_model", nothing)
                server.core.on_add = note
                await server.post(GENERATE, request)
            (used,) = reads
            server.core.reset()

            waits = isinstance(used, dict) and bool(used.get("do_remote_prefill"))
            answer = await server.post(GENERATE, request)
            assert answer.status == (400 if used == SPOILT else 200)
            assert server.core.told == ([SPOILT] if used == SPOILT else [])
            server.core.reset()
            answer = await server.post(GENERATE, {**request, "model": "no-such"})
            assert answer.status == 404
            assert server.core.told == ([used] if waits else [])

    run(test())


async def nothing(*args: object) -> None:
    """Check nothing."""


@pytest.mark.parametrize("endpoint", [COMPLETIONS, CHAT])
def test_sampling_parameters_of_another_endpoint_say_nothing(endpoint: str) -> None:
    async def test() -> None:
        async with serving() as server:
            request = body(endpoint, None, model="no-such")
            request["sampling_params"] = {"extra_args": {"kv_transfer_params": REMOTE}}
            await server.post(endpoint, request)
            assert server.core.requests == []

    run(test())


# ---------------------------------------------------------------- who may have something told


@pytest.mark.parametrize(
    ("path", "endpoint"),
    [(COMPLETIONS,) * 2, (GENERATE,) * 2, ("/invocations", COMPLETIONS), ("/invocations", CHAT)],
)
@pytest.mark.parametrize("key", ["secret", "other", "wrong", None])
def test_only_who_has_the_key(path: str, endpoint: str, key: str | None) -> None:
    async def test() -> None:
        async with serving("--api-key", "secret", "other") as server:
            header = [("Authorization", f"Bearer {key}")] if key else []
            answer = await server.post(path, body(endpoint, temperature=-1.0), headers=header)
            assert answer.status in (400, 401)
            assert server.core.told == [REMOTE] * (key in ("secret", "other"))

    run(test())


HOSTILE = ["x" * 5_000_000, "a\nb\r\x1b[31mc", "\u202e\ud800", "é"]


@pytest.mark.parametrize("name", HOSTILE, ids=lambda name: repr(name[:9]))
@pytest.mark.parametrize("where", ["body", "header"])
def test_an_id_of_a_client_is_short_and_plain(name: str, where: str) -> None:
    async def test() -> None:
        async with serving() as server:
            request = body(CHAT, model="no-such")
            if where == "body":
                request["request_id"] = name
                await server.post(CHAT, request)
            else:
                raw = name.encode(errors="replace").decode("latin-1")
                server.app.middleware_stack = server.app.build_middleware_stack()
                await server.post(CHAT, request, headers=[("X-Request-Id", raw)])
            (told,) = server.core.requests
            assert len(told.request_id) < 150
            assert told.request_id.isascii() and told.request_id.isprintable()

    run(test())


def test_names_that_are_no_text() -> None:
    for name in (None, "", 7, ["x"]):
        assert rejection._readable(name).isalnum()
    assert rejection._readable("of a\nclient") == "of_a_client"
    assert len(rejection._readable("x" * 5_000)) < 150


# ---------------------------------------------------------------- the cost


@pytest.mark.parametrize(("params", "kept"), [(REMOTE, True), (None, False)])
def test_a_body_is_kept_until_admission_and_only_if_it_may_matter(
    params: object, kept: bool
) -> None:
    marker = "unmistakable " * 3

    def bodies() -> int:
        """Lists that hold the raw body, as the route keeps it."""
        return sum(
            type(held) is list and len(held) == 1 and type(held[0]) is bytes
            and marker.encode() in held[0]
            for held in gc.get_objects()
        )  # fmt: skip

    async def test() -> None:
        async with serving() as server:
            server.core.ready.clear()
            server.core.answers = False
            request = body(COMPLETIONS, params, stream=True, prompt=marker)
            assert len(marker) < MAX_MODEL_LEN
            left = asyncio.Event()
            visit = asyncio.create_task(server.post(COMPLETIONS, request, leaves=left.wait()))
            await server.core.asked.wait()
            assert bool(bodies()) == kept
            server.core.ready.set()
            await server.settled()
            while not server.core.admitted:
                await asyncio.sleep(0.01)
            assert bodies() == 0
            left.set()
            await visit

    run(test())


def test_no_exchange_where_nothing_is_transferred() -> None:
    seen: list[object] = []

    async def test() -> None:
        async with serving(connector=None) as server:

            async def note(request: EngineCoreRequest) -> None:
                seen.append(current_exchange())

            server.core.on_add = note
            await server.post(COMPLETIONS, body(COMPLETIONS))
        assert seen == [None]

    run(test())


@pytest.mark.parametrize("params", [None, {**REMOTE, "do_remote_prefill": False}])
def test_a_refusal_that_concerns_nobody_is_answered_as_ever(params: object) -> None:
    """Up to 0.22 that closes the connection; where nothing waits, that is left alone."""

    async def test() -> None:
        changes = {"max_tokens": MAX_MODEL_LEN + 1}
        async with serving() as server:
            ours = await server.post(COMPLETIONS, body(COMPLETIONS, params, **changes))
        async with serving(connector=None) as server:
            plain = await server.post(COMPLETIONS, body(COMPLETIONS, params, **changes))
        assert (ours.status, ours.closed) == (plain.status, plain.closed)

    run(test())

"""Every refusal, endpoint, streamed or not: told once; not after admission or before a retry.

Over vLLM's real application (`tests.support.serving_app`); what the engine core is sent decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
from collections.abc import Callable, Coroutine, Iterator
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI, Request, Response
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackEncoder

from tests.support.lying_params import lying_params
from tests.support.release import since
from tests.support.serving_app import (
    ENDPOINTS,
    MAX_MODEL_LEN,
    REMOTE,
    Answer,
    Server,
    body,
    serving,
)
from tests.support.takers import TAKERS
from vllm_overlay.distributed.kv_transfer.fix_counts import taken
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.params import (
    find_problem,
    find_unsendable,
    peer_problem,
)
from vllm_overlay.engine.protocol import KVTransferNotifier
from vllm_overlay.entrypoints import rejection
from vllm_overlay.entrypoints.kept_body import KeptBody
from vllm_overlay.entrypoints.verdict import is_final
from vllm_overlay.logging_utils.bounded_log import BoundedLog
from vllm_overlay.v1.engine.admission import current_exchange

COMPLETIONS, CHAT, RESPONSES, MESSAGES, GENERATE = ENDPOINTS
TOO_LONG = "x" * (MAX_MODEL_LEN + 1)
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
OTHER = {"type": "function", "function": {"name": "other"}}
LOOKS_AFTER_ITSELF = not since("0.24")
"""Whether the clean-up around a handler is ours."""
STOCK_CLEANS_UP = since("0.21")
"""Whether stock has one."""
IMAGE = "data:image/png;base64,iVBORw0KGgo="


def user(content: object) -> list[dict[str, Any]]:
    """A conversation of one turn."""
    return [{"role": "user", "content": content}]


def sampling(
    *endpoints: str,
    **values: Any,  # noqa: ANN401 - any field
) -> dict[str, dict[str, Any]]:
    """The same change for several endpoints."""
    return dict.fromkeys(endpoints, values)


# What makes the server say no, and how to ask for it at each endpoint that can be asked.
REJECTIONS: dict[str, dict[str, dict[str, Any]]] = {
    # Refused while the body is read.
    "model of a wrong type": sampling(*ENDPOINTS, model=7),
    "stream of a wrong type": sampling(*ENDPOINTS, stream={}),
    "no input": {
        COMPLETIONS: {"prompt": None},
        CHAT: {"messages": None},
        RESPONSES: {"input": None},
        MESSAGES: {"messages": None},
        GENERATE: {"token_ids": None},
    },
    "empty input": {COMPLETIONS: {"prompt": ""}, GENERATE: {"token_ids": []}},
    "negative token id": {GENERATE: {"token_ids": [-1]}},
    "unknown tool": {
        CHAT: {"tools": [TOOL], "tool_choice": OTHER},
        MESSAGES: {
            "tools": [{"name": "look", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "tool", "name": "other"},
        },
    },
    "broken content": {
        CHAT: {"messages": user([{"type": "nonsense"}])},
        MESSAGES: {"messages": user([{"type": "nonsense"}])},
    },
    "top_logprobs without logprobs": sampling(CHAT, top_logprobs=2),
    "n of a wrong type": sampling(COMPLETIONS, CHAT, n="many"),
    # Refused by the handler.
    "unknown model": sampling(*ENDPOINTS, model="no-such-model"),
    "prompt too long": {
        COMPLETIONS: {"prompt": TOO_LONG},
        CHAT: {"messages": user(TOO_LONG)},
        RESPONSES: {"input": TOO_LONG},
        MESSAGES: {"messages": user(TOO_LONG)},
        GENERATE: {"token_ids": [3] * (MAX_MODEL_LEN + 1)},
    },
    "max_tokens too big": {
        COMPLETIONS: {"max_tokens": MAX_MODEL_LEN + 1},
        CHAT: {"max_tokens": MAX_MODEL_LEN + 1},
        MESSAGES: {"max_tokens": MAX_MODEL_LEN + 1},
    },
    "tool_choice without a parser": sampling(CHAT, tools=[TOOL], tool_choice="auto"),
    "previous response that does not exist": sampling(RESPONSES, previous_response_id="resp_x"),
    # Refused while sampling parameters are made, or by the input processor. A stream has
    # answered 200 by then.
    "temperature": sampling(COMPLETIONS, CHAT, RESPONSES, MESSAGES, GENERATE, temperature=-1.0),
    "top_p": sampling(COMPLETIONS, CHAT, RESPONSES, MESSAGES, GENERATE, top_p=7.0),
    "min_tokens": sampling(COMPLETIONS, CHAT, GENERATE, min_tokens=5),
    "n=0": sampling(COMPLETIONS, CHAT, GENERATE, n=0),
    "empty stop": sampling(COMPLETIONS, CHAT, GENERATE, stop=[""]),
    "too many logprobs": {
        COMPLETIONS: {"logprobs": 10_000},
        CHAT: {"logprobs": True, "top_logprobs": 10_000},
        GENERATE: {"logprobs": 10_000},
    },
    "logit_bias of no token": sampling(COMPLETIONS, CHAT, logit_bias={"999999": 1.0}),
    "token id out of range": {
        COMPLETIONS: {"prompt": [999_999]},
        GENERATE: {"token_ids": [999_999]},
    },
    "bad JSON schema": sampling(COMPLETIONS, CHAT, structured_outputs={"json": {"type": "no"}}),
    "bad regular expression": sampling(COMPLETIONS, CHAT, structured_outputs={"regex": "(("}),
    "bad grammar": sampling(COMPLETIONS, CHAT, structured_outputs={"grammar": "root ::= ("}),
}
TABLE = [
    pytest.param(endpoint, changes, stream, id=f"{name}-{endpoint}-{'stream' * stream or 'whole'}")
    for name, endpoints in REJECTIONS.items()
    for endpoint, changes in endpoints.items()
    for stream in (False, True)
    if "stream" not in changes or not stream
]


def run(test: Coroutine[Any, Any, None]) -> None:
    """Run one test, with a server of its own, in an event loop of its own."""
    asyncio.run(asyncio.wait_for(test, 60))


Scenario = Callable[[Server], Coroutine[Any, Any, None]]
Play = Callable[[Scenario], None]


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[asyncio.AbstractEventLoop, Server]]:
    """One server for many tests: starting one takes longer than a hundred requests."""
    loop = asyncio.new_event_loop()
    running = serving()
    server = loop.run_until_complete(running.__aenter__())
    yield loop, server
    loop.run_until_complete(running.__aexit__(None, None, None))
    if left := asyncio.all_tasks(loop):
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
    loop.close()


@pytest.fixture
def play(shared: tuple[asyncio.AbstractEventLoop, Server]) -> Iterator[Play]:
    """Play a scenario on the shared server, which is as new before and idle after it."""
    loop, server = shared
    server.core.reset()
    # The server remembers the answer to its first question.
    vars(server.engine).pop("_supported_tasks", None)
    yield lambda scenario: loop.run_until_complete(asyncio.wait_for(scenario(server), 60))
    server.core.reset()
    loop.run_until_complete(server.settled())


def assert_rejected(server: Server, answer: Answer) -> None:
    """The client got an error, the engine nothing to compute, the prefill server one message.

    Up to 0.22 /v1/messages answers 500 to what its handler raises. Where stock frees the blocks
    all the same, so do we; before 0.21 it holds them for a retry.
    """
    assert answer.status >= 400 or answer.error, answer
    assert server.core.admitted == []
    final = is_final(answer.status if answer.status != 200 else answer.error.get("code", 500))
    told = final or (answer.status == 500 and STOCK_CLEANS_UP)
    assert server.core.told == [REMOTE] * told


@pytest.mark.parametrize(("endpoint", "changes", "stream"), TABLE)
def test_every_rejection_is_told_once(
    play: Play, endpoint: str, changes: dict[str, Any], stream: bool
) -> None:
    async def test(server: Server) -> None:
        request = body(endpoint, **{"stream": stream, **changes})
        assert_rejected(server, await server.post(endpoint, request))

    play(test)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_what_is_served_is_not_told(play: Play, endpoint: str, stream: bool) -> None:
    async def test(server: Server) -> None:
        answer = await server.post(endpoint, body(endpoint, stream=stream))
        assert answer.status == 200 and not answer.error
        assert len(server.core.admitted) == 1
        assert server.core.told == []

    play(test)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("endpoint", "part"),
    [
        (CHAT, {"type": "image_url", "image_url": {"url": IMAGE}}),
        (MESSAGES, {"type": "image", "source": {"type": "url", "url": IMAGE}}),
    ],
)
# vLLM makes a coroutine for each picture and drops it when the first check fails.
@pytest.mark.filterwarnings(
    "ignore:.*AsyncMultiModalContentParser:pytest.PytestUnraisableExceptionWarning",
    "ignore:coroutine .*AsyncMultiModalContentParser.* was never awaited:RuntimeWarning",
)
def test_an_image_for_a_text_model(
    play: Play, endpoint: str, part: dict[str, Any], stream: bool
) -> None:
    async def test(server: Server) -> None:
        request = body(endpoint, messages=user([part]), stream=stream)
        assert_rejected(server, await server.post(endpoint, request))

    play(test)
    gc.collect()  # and not in the middle of another test


@pytest.mark.parametrize("endpoint", [COMPLETIONS, CHAT])
def test_stream_options_without_a_stream(play: Play, endpoint: str) -> None:
    async def test(server: Server) -> None:
        request = body(endpoint, stream_options={"include_usage": True})
        assert_rejected(server, await server.post(endpoint, request))

    play(test)


@pytest.mark.parametrize("rank", ["7", "-1"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("endpoint", [COMPLETIONS, CHAT, MESSAGES])
def test_a_rank_that_does_not_exist(endpoint: str, stream: bool, rank: str) -> None:
    async def test() -> None:
        async with serving(ranks=2) as server:
            header = [("X-data-parallel-rank", rank)]
            answer = await server.post(endpoint, body(endpoint, stream=stream), headers=header)
            assert_rejected(server, answer)

    run(test())


def test_a_rank_that_exists_is_kept() -> None:
    async def test() -> None:
        async with serving(ranks=2) as server:
            header = [("X-data-parallel-rank", "1")]
            await server.post(COMPLETIONS, body(COMPLETIONS, model="no-such"), headers=header)
            assert [r.data_parallel_rank for r in server.core.requests] == [1]

    run(test())


# ---------------------------------------------------------------- nothing to tell


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_nothing_is_told_without_a_connector(endpoint: str) -> None:
    async def test() -> None:
        async with serving(connector=None) as server:
            await server.post(endpoint, body(endpoint, model="no-such"))
            await server.post(endpoint, body(endpoint, stream={}))
            assert server.core.requests == []

    run(test())


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        {**REMOTE, "do_remote_prefill": False},
        {"do_remote_decode": True},
        "do_remote_prefill",
        ["do_remote_prefill"],
        7,
    ],
    ids=str,
)
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_nothing_is_told_without_a_remote_prefill(
    play: Play, endpoint: str, params: object
) -> None:
    async def test(server: Server) -> None:
        answer = await server.post(endpoint, body(endpoint, params, model="no-such"))
        assert answer.status >= 400
        assert server.core.requests == []

    play(test)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"do_remote_prefill",
        b'["do_remote_prefill"]',
        b'"do_remote_prefill"',
        b'{"kv_transfer_params": {"do_remote_prefill": true}',
        b'{"kv_transfer_params": "do_remote_prefill", "sampling_params": 1}',
        b"\xff do_remote_prefill",
    ],
    ids=lambda raw: repr(raw[:40]),
)
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_body_that_is_no_request(play: Play, endpoint: str, raw: bytes) -> None:
    async def test(server: Server) -> None:
        answer = await server.post(endpoint, raw)
        assert answer.status in (400, 500)  # vLLM's own validators trip over a list
        assert server.core.requests == []
        served = await server.post(endpoint, body(endpoint))
        assert served.status == 200

    play(test)


def test_who_is_not_let_in_triggers_nothing() -> None:
    async def test() -> None:
        async with serving("--api-key", "secret") as server:
            answer = await server.post(COMPLETIONS, body(COMPLETIONS, model="no-such"))
            assert answer.status == 401
            assert server.core.requests == []

    run(test())


# ---------------------------------------------------------------- parameters that lie


def encodable(value: object) -> bool:
    """Whether the wire to the engine core can carry it: 64-bit numbers and whole characters."""
    try:
        MsgpackEncoder().encode(value)
    except (OverflowError, UnicodeEncodeError):
        return False
    return True


@settings(
    max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(endpoint=st.sampled_from(TAKERS), stream=st.booleans(), params=lying_params(REMOTE))
def test_a_lie_is_refused_by_name_and_told_once(
    shared: tuple[asyncio.AbstractEventLoop, Server], endpoint: str, stream: bool, params: object
) -> None:
    """The client learns what is wrong, the server goes on, P hears if there is a P to hear."""
    loop, server = shared
    server.core.reset()
    books = server.engine.output_processor.get_num_unfinished_requests()
    answer = loop.run_until_complete(server.post(endpoint, body(endpoint, params, stream=stream)))
    looked_at = params
    if isinstance(params, dict) and not params.get("do_remote_prefill"):
        looked_at = {**params, "remote_block_ids": None}  # a prefill goes on
    problem = find_unsendable(params) or find_problem(looked_at)
    if problem is None:
        assert answer.status == 200 and not answer.error
        assert len(server.core.admitted) == 1
        assert server.core.told == []
    else:
        assert answer.status == 400
        message = answer.error["message"]
        # 0.33.0 itself looks at numbers there, and does not say in which field.
        by_release = endpoint == "/inference/v1/generate" and message.startswith("extra_args ")
        assert by_release or (problem.field or "kv_transfer_params") in message
        assert server.core.admitted == []
        # Who cannot be addressed cannot be told.
        waits = (
            isinstance(params, dict)
            and params.get("do_remote_prefill")
            and peer_problem(params) is None
        )
        assert len(server.core.told) == bool(waits and encodable(params))
    assert server.engine.output_processor.get_num_unfinished_requests() == books


# ---------------------------------------------------------------- the client goes away


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_client_that_leaves_before_admission(play: Play, endpoint: str, stream: bool) -> None:
    async def test(server: Server) -> None:
        server.core.ready.clear()  # validation waits
        left = asyncio.Event()
        visit = asyncio.create_task(
            server.post(endpoint, body(endpoint, stream=stream), leaves=left.wait())
        )
        await server.core.asked.wait()
        left.set()
        await visit
        server.core.ready.set()
        await server.settled()
        assert server.core.requests == []  # its router sends the request again, to any server

    play(test)


@pytest.mark.parametrize("works", [True, False], ids=["sent", "not sent"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("endpoint", TAKERS)
def test_a_client_that_leaves_during_admission(
    play: Play, endpoint: str, stream: bool, works: bool
) -> None:
    """Sent after all: the engine answers for it, and the request nobody waits for is aborted."""

    async def test(server: Server) -> None:
        server.core.answers = False
        books = server.engine.output_processor.get_num_unfinished_requests()
        sending, go_on = asyncio.Event(), asyncio.Event()

        async def slow(request: EngineCoreRequest) -> None:
            if not request.abort_immediately:
                sending.set()
                await go_on.wait()
                if not works:
                    raise OSError("the engine core does not take it")

        server.core.on_add = slow
        visit = asyncio.create_task(
            server.post(endpoint, body(endpoint, stream=stream), leaves=sending.wait())
        )
        await sending.wait()
        await server.settled()
        assert server.core.requests == []  # nobody knows yet, so nobody is told
        go_on.set()
        await visit
        await server.settled()
        if works:
            assert server.core.told == []
            assert server.core.aborted == [r.request_id for r in server.core.admitted]
            assert len(server.core.aborted) == 1
            assert server.engine.output_processor.get_num_unfinished_requests() == books
        else:
            assert server.core.requests == []

    play(test)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_client_that_leaves_after_admission(play: Play, endpoint: str, stream: bool) -> None:
    async def test(server: Server) -> None:
        server.core.answers = False
        added = asyncio.Event()

        async def note(request: EngineCoreRequest) -> None:
            asyncio.get_running_loop().call_later(0.02, added.set)

        server.core.on_add = note
        await server.post(endpoint, body(endpoint, stream=stream), leaves=added.wait())
        await server.settled()
        assert len(server.core.admitted) == 1
        assert server.core.aborted == [server.core.admitted[0].request_id]
        assert server.core.told == []

    play(test)


@pytest.mark.parametrize("times", [1, 2, 5])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_server_task_that_is_cancelled(
    play: Play, endpoint: str, stream: bool, times: int
) -> None:
    """As middleware cancels its application; again and again, as a task group does."""

    async def test(server: Server) -> None:
        server.core.ready.clear()
        visit = asyncio.create_task(server.post(endpoint, body(endpoint, stream=stream)))
        await server.core.asked.wait()
        for _ in range(times):
            visit.cancel()
            await asyncio.sleep(0)
        with contextlib.suppress(asyncio.CancelledError):
            await visit
        server.core.ready.set()
        await server.settled()
        assert server.core.told == []  # vLLM may leave a handler running, which reads later

    play(test)


# ---------------------------------------------------------------- the notification itself


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_notification_that_fails(
    play: Play,
    endpoint: str,
    stream: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It costs a log line; the client gets the answer it would have got."""
    monkeypatch.setattr(rejection, "log", BoundedLog(logging.getLogger("vllm.kvfix")))

    async def test(server: Server) -> None:

        async def broken(request: EngineCoreRequest) -> None:
            raise OSError("the engine core is gone")

        request = body(endpoint, stream=stream, model="no-such")
        before = await server.post(endpoint, request)
        server.core.requests.clear()
        server.core.on_add = broken
        after = await server.post(endpoint, request)
        assert (after.status, after.error) == (before.status, before.error)
        assert server.core.requests == []

    with log_of_vllm(caplog):
        play(test)
    assert "Could not tell the prefill server about rejected request" in caplog.text


def test_two_rejections_under_one_name_are_two(play: Play) -> None:
    """The scheduler knows requests by id; a client may use its own twice."""

    async def test(server: Server) -> None:
        for port in (1, 2):
            params = {**REMOTE, "remote_port": port}
            await server.post(CHAT, body(CHAT, params, model="no-such", request_id="mine"))
        assert [told["remote_port"] for told in server.core.told] == [1, 2]
        first, second = server.core.requests
        assert first.request_id != second.request_id
        assert "mine" in first.request_id

    play(test)


# ---------------------------------------------------------------- other ways through the server


@pytest.mark.skipif(RESPONSES not in TAKERS, reason="from 0.19.0 on it is about transfers")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("works", [True, False], ids=["served", "rejected"])
def test_a_response_in_the_background(
    works: bool, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer is over before its request is admitted, or not; it was no refusal."""
    monkeypatch.setenv("VLLM_ENABLE_RESPONSES_API_STORE", "1")

    async def test() -> None:
        async with serving() as server:
            server.core.ready.clear()
            left = asyncio.Event()
            request = body(RESPONSES, background=True, store=True, stream=stream)
            request |= {"include": ["message.output_text.logprobs"]}
            request |= {"top_logprobs": 1 if works else 10_000}
            visit = asyncio.create_task(server.post(RESPONSES, request, leaves=left.wait()))
            await server.core.asked.wait()
            left.set()
            await visit
            assert server.core.requests == []
            server.core.ready.set()
            await server.settled()
            assert len(server.core.readers) == works
            assert server.core.told == []

    run(test())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("endpoint", [COMPLETIONS, CHAT])
def test_a_refusal_leaves_the_connection_open(play: Play, endpoint: str, stream: bool) -> None:
    """A router's next request is on its way; if it got lost, nobody would free its blocks."""

    async def test(server: Server) -> None:
        changes = {"max_tokens": MAX_MODEL_LEN + 1}
        answer = await server.post(endpoint, body(endpoint, stream=stream, **changes))
        assert answer.status == 400
        assert answer.error
        assert not answer.closed
        assert server.core.told == [REMOTE]

    play(test)


def test_a_fault_of_the_server_is_still_raised(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(server: Server) -> None:
        def fail(*args: object, **kwargs: object) -> None:
            raise RuntimeError("a fault")

        handler = server.app.state.openai_serving_completion
        monkeypatch.setattr(handler, "create_completion", fail)
        answer = await server.post(COMPLETIONS, body(COMPLETIONS))
        assert answer.status == 500
        assert answer.closed
        assert server.core.told == []

    play(test)


def test_a_handler_that_is_used_without_http(play: Play) -> None:
    async def test(server: Server) -> None:
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest

        handler = server.app.state.openai_serving_completion
        assert handler.has_kv_connector
        rejected = CompletionRequest(**body(COMPLETIONS, model="no-such"))
        await handler.create_completion(rejected)
        assert server.core.told == [REMOTE]
        served = CompletionRequest(**body(COMPLETIONS))
        await handler.create_completion(served)
        assert len(server.core.told) == 1 and len(server.core.admitted) == 1

    play(test)


@pytest.mark.skipif(not LOOKS_AFTER_ITSELF, reason="upstream's own clean-up, left as it is")
@pytest.mark.parametrize("status", [429, 500, 503, None])
def test_a_handler_without_http_that_asks_for_a_retry(
    play: Play, status: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(server: Server) -> None:
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest

        handler = server.app.state.openai_serving_completion

        async def fail(*args: object) -> object:
            if status is None:
                raise RuntimeError("a fault")
            return handler.create_error_response("later", "Busy", HTTPStatus(status))

        monkeypatch.setattr(handler, "_check_model", fail)
        with contextlib.suppress(RuntimeError):
            await handler.create_completion(CompletionRequest(**body(COMPLETIONS)))
        assert server.core.requests == []

    play(test)


@contextlib.contextmanager
def log_of_vllm(caplog: pytest.LogCaptureFixture) -> Any:  # noqa: ANN401
    """vLLM's logger does not pass its records on; listen to it directly."""
    import logging

    logger = logging.getLogger("vllm")
    logger.addHandler(caplog.handler)
    try:
        yield
    finally:
        logger.removeHandler(caplog.handler)


# ---------------------------------------------------------------- the route alone


class Teller:
    """An engine client that notes what it is told: names, parameters, engines."""

    def __init__(self) -> None:
        config = SimpleNamespace(kv_connector="NixlConnector", kv_connector_module_path=None)
        self.vllm_config = SimpleNamespace(kv_transfer_config=config)
        self.told: list[tuple[object, ...]] = []

    async def notify_kv_transfer_request_rejected(
        self, name: str, params: dict[str, Any], *, data_parallel_rank: int | None = None
    ) -> None:
        self.told.append((name, params, data_parallel_rank))


class Breaks(Response):
    """An answer that begins, and goes no further."""

    async def __call__(self, scope: object, receive: object, send: Any) -> None:  # noqa: ANN401
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ValueError("in the middle")


def ask_alone(
    answer: Response | Exception,
    *,
    engine: Teller | None,
    handler: Any = None,  # noqa: ANN401
    path: str = COMPLETIONS,
    refused: bool = False,
    leaves: bool = False,
    headers: dict[str, str] | None = None,
    **fields: object,
) -> tuple[list[int], bool, bool]:
    """Send a body with some fields, in parts, to a route with an answer of its own.

    `handler` is the application's for what is raised, and `refused` what the endpoint says of the
    request to a route that watches.

    Returns:
        The statuses that are sent, whether the application raises, and whether the route watches.
    """
    app, sent, watches = FastAPI(), list[int](), list[bool]()
    app.state.engine_client = engine

    async def endpoint(request: Request) -> Response:
        assert await request.json() == fields
        if leaves:
            await request.receive()
        exchange = current_exchange()
        watches.append(exchange is not None)
        if exchange is not None:
            exchange.refused = refused
        if isinstance(answer, Exception):
            raise answer
        return answer

    app.router.routes.append(rejection.KVTransferRoute(path, endpoint, methods=["POST"]))
    if handler is not None:
        app.add_exception_handler(Exception, handler)
    raw = json.dumps(fields).encode()
    incoming: list[dict[str, Any]] = [
        {"type": "http.request", "body": raw[:9], "more_body": True},
        {"type": "http.request", "body": raw[9:], "more_body": True},
        {"type": "http.request"},
        {"type": "http.disconnect"},
    ]

    async def receive() -> dict[str, Any]:
        return incoming.pop(0)

    async def send(message: Any) -> None:  # noqa: ANN401 - of ASGI
        sent.extend([message["status"]] if "status" in message else ())

    named = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": named}
    try:
        asyncio.run(app(scope, receive, send))
    except ValueError:
        return sent, True, watches[0]
    return sent, False, watches[0]


def answering(status: int) -> Any:  # noqa: ANN401
    async def answer(request: Request, error: Exception) -> Response:
        return Response(f"{request.url.path}: {error.args}", status)

    return answer


def answers_in_a_thread(request: Request, error: Exception) -> Response:
    return Response("no", 400)


@pytest.mark.parametrize(
    ("handler", "status", "params", "raises"),
    [
        (answering(400), 400, REMOTE, False),
        (answering(499), 499, REMOTE, False),
        (answering(500), 500, REMOTE, True),
        (answering(400), 400, None, True),
        (answers_in_a_thread, 400, REMOTE, True),
        (None, 500, REMOTE, True),
    ],
)
def test_a_refusal_that_is_raised_is_answered_and_told(
    handler: object, status: int, params: object, raises: bool
) -> None:
    engine = Teller()
    error = ValueError("no")
    found = ask_alone(error, engine=engine, handler=handler, kv_transfer_params=params)
    assert found == ([status], raises, True)
    assert len(engine.told) == (not raises)


def test_an_answer_that_has_begun_is_no_refusal() -> None:
    engine = Teller()
    found = ask_alone(Breaks(), engine=engine, handler=answering(400), kv_transfer_params=REMOTE)
    assert found == ([200], True, True)
    assert engine.told == []


@pytest.mark.parametrize(
    ("status", "refused", "leaves", "told"),
    [
        (400, False, False, True),
        (400, False, True, False),
        (500, False, False, False),
        (500, True, False, True),
        (429, True, False, False),
        (200, True, False, False),
    ],
)
def test_what_is_refused_for_good_is_told_of_who_hears_it(
    status: int, refused: bool, leaves: bool, told: bool
) -> None:
    engine = Teller()
    how: dict[str, Any] = {"engine": engine, "refused": refused, "leaves": leaves}
    ask_alone(Response(status_code=status), **how, kv_transfer_params=REMOTE)
    assert [params for _, params, _ in engine.told] == [REMOTE] * told


@pytest.mark.parametrize(
    ("headers", "fields", "name"),
    [
        ({"X-Request-Id": "head"}, {"request_id": "body"}, "head"),
        ({}, {"request_id": "body"}, "body"),
        ({"X-Request-Id": "head"}, {}, "head"),
    ],
)
def test_a_request_is_told_by_its_client_s_name(
    headers: dict[str, str], fields: dict[str, Any], name: str
) -> None:
    engine = Teller()
    fields = {"kv_transfer_params": REMOTE, **fields}
    ask_alone(Response(status_code=400), engine=engine, headers=headers, **fields)
    assert engine.told == [(name, REMOTE, None)]


def test_a_body_is_let_go_before_anybody_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may hold images, and P may be slow."""
    bodies: list[KeptBody] = []
    held: list[dict[str, Any]] = []

    class Noted(KeptBody):
        def __init__(self) -> None:
            super().__init__()
            bodies.append(self)

    class Looks(Teller):
        async def notify_kv_transfer_request_rejected(self, *args: Any, **named: Any) -> None:  # noqa: ANN401
            held.extend(body.parsed for body in bodies)
            await super().notify_kv_transfer_request_rejected(*args, **named)

    monkeypatch.setattr(rejection, "KeptBody", Noted)
    ask_alone(Response(status_code=400), engine=Looks(), kv_transfer_params=REMOTE)
    assert held == [{}]


@pytest.mark.parametrize(("path", "engine"), [("/v1/other", Teller()), (COMPLETIONS, None)])
def test_a_route_watches_only_where_blocks_may_wait(path: str, engine: Teller | None) -> None:
    answer = Response(status_code=400)
    found = ask_alone(answer, engine=engine, path=path, kv_transfer_params=REMOTE)
    assert found == ([400], False, False)


@pytest.mark.parametrize("params", [None, "do_remote_prefill", ["do_remote_prefill"], {}])
def test_what_says_of_no_blocks_that_they_wait(params: object) -> None:
    assert rejection.remote_prefill(params) is None
    assert rejection.remote_prefill(REMOTE) is REMOTE


def guard(module: str, lets_in: bool | None) -> Any:  # noqa: ANN401
    """A middleware, which looks at a key if it says whether it lets somebody in."""

    class Guard:
        __module__ = module

        def __init__(self, app: object) -> None:
            pass

    if lets_in is not None:
        Guard.verify_token = lambda self, headers: lets_in  # type: ignore[attr-defined]
    return SimpleNamespace(cls=Guard, args=(), kwargs={})


@pytest.mark.parametrize(
    ("guards", "told"),
    [
        ([("vllm.entrypoints", True)], True),
        ([("vllm.entrypoints", False)], False),
        ([("vllm.entrypoints", None), ("vllm.another", False)], False),
        ([("elsewhere", False)], True),
        ([], True),
    ],
)
def test_only_the_server_s_own_key_counts(guards: list[Any], told: bool) -> None:
    app = SimpleNamespace(user_middleware=[guard(*one) for one in guards])
    engine = Teller()
    request = Request({"type": "http", "headers": [], "app": app})
    asyncio.run(rejection.notify(engine, "mine", REMOTE, request))
    assert engine.told == [("mine", REMOTE, None)] * told


@pytest.mark.parametrize(
    ("asked_for", "rank"), [(None, None), ([], None), ([b"first"], None), ([b"3"], 3)]
)
def test_the_engine_that_was_asked_for_is_told(
    asked_for: list[bytes] | None, rank: int | None
) -> None:
    """Also without an application or a request, as Ray Serve LLM calls handlers."""
    engine, request = Teller(), None
    if asked_for is not None:
        headers = [(b"x-data-parallel-rank", value) for value in asked_for]
        request = Request({"type": "http", "headers": headers})
    asyncio.run(rejection.notify(engine, "mine", REMOTE, request))
    assert engine.told == [("mine", REMOTE, rank)]


def test_what_has_a_requests_headers_and_no_more_is_told_of() -> None:
    """SkyRL calls handlers with such."""
    engine, request = Teller(), SimpleNamespace(headers={}, state=SimpleNamespace())
    asyncio.run(rejection.notify(engine, "mine", REMOTE, request))
    assert engine.told == [("mine", REMOTE, None)]


class Mute(KVTransferNotifier):
    """An engine client that cannot tell anybody."""


class Failing(KVTransferNotifier):
    async def notify_kv_transfer_request_rejected(self, *args: object, **kwargs: object) -> None:
        raise OSError("the engine core is gone")


@pytest.mark.parametrize(
    ("engine", "counted"),
    [(Mute(), {}), (SimpleNamespace(), {}), (Failing(), {"REJECTION_LOST": 1})],
)
def test_who_cannot_tell_is_not_asked_and_what_fails_is_counted(
    engine: Any,  # noqa: ANN401
    counted: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[object] = []
    monkeypatch.setattr("vllm_overlay.engine.protocol.logger.warning", asked.append)
    asyncio.run(rejection.tell(engine, "mine", REMOTE, None))
    assert asked == []
    assert taken() == counted

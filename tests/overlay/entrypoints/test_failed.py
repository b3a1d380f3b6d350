"""What a stream is told of its request's failure, and what stays as it is."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine import EngineCoreRequest

from tests.support.release import since
from tests.support.serving_app import ENDPOINTS, Answer, ScriptedCore, body, serving

pytest.importorskip("vllm_overlay.entrypoints.failed", reason="up to 0.31.0")
from vllm_overlay.entrypoints.failed import raises_if_all_failed, says_what_failed

COMPLETIONS, CHAT, _, _, GENERATE = ENDPOINTS
USAGE = {"include_usage": True}


class FailedError(Exception):
    pass


class Serving:
    """An endpoint with a stream as vLLM's are: it leaves out what has neither text nor tokens."""

    def _raise_if_error(self, finish_reason: str | None, request_id: str) -> None:
        if finish_reason == "error":
            raise FailedError(request_id)

    def stream(self, *asked: Any, **named: Any) -> AsyncIterator[str]:  # noqa: ANN401
        return says_what_failed(Serving._stream)(self, *asked, **named)

    async def _stream(
        self, request: object, result_generator: AsyncIterator[Any], request_id: str
    ) -> AsyncIterator[str]:
        try:
            async for piece in result_generator:
                result = piece[1] if isinstance(piece, tuple) else piece
                for output in result.outputs:
                    if output.text:
                        self._raise_if_error(output.finish_reason, request_id)
                        yield output.text
            yield "usage"
        except FailedError as failed:
            yield f"{failed} failed"


def piece(text: str, finish_reason: str | None = None, prompt: int | None = None) -> Any:  # noqa: ANN401
    output = SimpleNamespace(text=text, token_ids=[*text], finish_reason=finish_reason)
    result = SimpleNamespace(outputs=[output])
    return result if prompt is None else (prompt, result)


async def of(pieces: Sequence[Any]) -> AsyncIterator[Any]:
    for one in pieces:
        yield one


def told(*pieces: Any) -> list[str]:  # noqa: ANN401
    async def listen() -> list[str]:
        return [text async for text in Serving().stream("any", of(pieces), request_id="r")]

    return asyncio.run(listen())


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        ([], ["usage"]),
        ([piece("a"), piece("b", "stop")], ["a", "b", "usage"]),
        ([piece("", "error")], ["r failed"]),
        ([piece(""), piece("", "error")], ["r failed"]),
        ([piece("a"), piece("", "error")], ["a", "usage"]),
        ([piece("", "error", 1), piece("", "error", 0)], ["r failed"]),
        # Who is charged by usage has something to be charged for.
        ([piece("", "error"), piece("b"), piece("c", "length")], ["b", "c", "usage"]),
        ([piece("b", "stop", 0), piece("", "error", 1)], ["b", "usage"]),
        ([piece("", "error"), piece("", "stop")], ["usage"]),
        ([piece("a"), piece("b", "error"), piece("c")], ["a", "r failed"]),
        ([piece(""), piece("a", "abort")], ["a", "usage"]),
    ],
)
def test_what_a_client_is_told(pieces: list[Any], said: list[str]) -> None:
    assert told(*pieces) == said


def test_who_leaves_lets_go_of_what_it_listened_to() -> None:
    """At once, as on stock: that is how a request is aborted."""

    async def leave() -> None:
        inner = of([piece("a"), piece("b")])
        gone = weakref.ref(inner)
        stream = Serving().stream("any", inner, "r")
        del inner
        assert await anext(stream) == "a"
        await stream.aclose()  # type: ignore[attr-defined]
        del stream
        assert gone() is None

    gc.disable()
    try:
        asyncio.run(leave())
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("choices", "fails"),
    [
        ([("", "error")], True),
        ([("", "error")] * 2, True),
        ([("", "error"), ("", "stop")], False),
        ([("", "stop")], False),
        ([("a", "error")], False),
        ([], False),
    ],
)
def test_an_answer_that_does_not_stream(choices: list[tuple[str, str]], fails: bool) -> None:
    outputs = [piece(*choice).outputs[0] for choice in choices]
    if fails:
        with pytest.raises(FailedError):
            raises_if_all_failed(Serving(), outputs, "r")
    else:
        raises_if_all_failed(Serving(), outputs, "r")


def one_by_one(core: ScriptedCore, first: EngineCoreRequest, second: EngineCoreRequest) -> None:
    loop = asyncio.get_running_loop()
    loop.call_soon(core.fail, first)
    loop.call_later(0.1, core.finish, second)


def at_once(core: ScriptedCore, first: EngineCoreRequest, second: EngineCoreRequest) -> None:
    core.fail(first)
    core.finish(second)


def answered_in_part(endpoint: str, end: Callable[..., None], **changes: object) -> Answer:
    """What a client gets of a request for two choices, of which one fails as `end` has it."""

    async def visit() -> Answer:
        async with serving() as server:
            server.core.answers = False
            waiting: list[EngineCoreRequest] = []

            async def on_add(request: EngineCoreRequest) -> None:
                waiting.append(request)
                if len(waiting) == 2:
                    end(server.core, *waiting)

            server.core.on_add = on_add
            return await server.post(endpoint, body(endpoint, **changes))

    return asyncio.run(asyncio.wait_for(visit(), 60))


@pytest.mark.parametrize(
    ("endpoint", "changes"),
    [(COMPLETIONS, {"prompt": ["hi", "ho"]}), (COMPLETIONS, {"n": 2}), (CHAT, {"n": 2})],
)
def test_the_other_choices_are_answered_as_on_stock(
    endpoint: str, changes: dict[str, object]
) -> None:
    answer = answered_in_part(endpoint, one_by_one, stream=True, stream_options=USAGE, **changes)
    events = [line.removeprefix("data: ") for line in answer.body.decode().split("\n\n")]
    choices = [c for e in events if e.startswith("{") for c in json.loads(e).get("choices", ())]
    said = [c["delta"].get("content", "") if endpoint == CHAT else c["text"] for c in choices]
    assert "".join(said) == "aa"
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["length"]
    assert json.loads(events[-3])["usage"]["completion_tokens"] == 2
    assert events[-2] == "[DONE]"
    assert not answer.error


@pytest.mark.skipif(since("0.29.0"), reason="upstream answers with 500 whatever the others are")
def test_a_choice_of_a_token_level_answer_that_failed_is_named_beside_the_others() -> None:
    answer = answered_in_part(GENERATE, at_once, n=2)
    assert answer.status == 200
    assert b'"finish_reason":"error"' in answer.body
    assert b'"finish_reason":"length"' in answer.body

"""K10: of the requests that one client request becomes, one reads the prefill server's blocks.

The API server is real. The engine core behind it samples tokens that depend on the KV that a
request got, and gets the KV from a prefill server that frees it as soon as it was read.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import zlib
from collections import Counter
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
from vllm.v1.engine import EngineCoreRequest

from tests.support.serving_app import REMOTE, Server, body, serving

PATH = "/v1/completions"
BATCH = "/v1/chat/completions/batch"
PROMPTS = [[10, 11, 12, 13], [20, 21], [30, 31, 32]]
JUNK = 99
"""What is in blocks that were given to somebody else."""


class Engine:
    """The engine core of a decode server, and the prefill server that it reads from.

    Attributes:
        heard: request id on the prefill server -> how often it was told that its KV was read.
        asked: sampling parameters of every request, in order.
    """

    def __init__(self, server: Server, prefilled: Sequence[int]) -> None:
        self.core = server.core
        self.held = {REMOTE["remote_request_id"]: list(prefilled)}
        self.heard: Counter[str] = Counter()
        self.asked: list[dict[str, Any]] = []
        self.core.answers = False
        self.core.on_add = self.compute

    async def compute(self, request: EngineCoreRequest) -> None:
        params = request.sampling_params
        assert params is not None
        transfer = (params.extra_args or {}).get("kv_transfer_params") or {}
        prompt = list(request.prompt_token_ids or [])
        kv = prompt
        if transfer.get("do_remote_prefill"):
            # A prompt's tokens stand for its KV; blocks beyond what was prefilled hold junk.
            held = self.held.pop(transfer["remote_request_id"], [])
            kv = [*held, *[JUNK] * len(prompt)][: len(prompt)]
            self.heard[transfer["remote_request_id"]] += 1
        seen = json.dumps([kv, params.seed, params.temperature]).encode()
        tokens = [2 + zlib.crc32(seen + bytes([i])) % 90 for i in range(params.max_tokens or 1)]
        self.asked.append(
            {name: getattr(params, name) for name in ("n", "seed", "temperature", "max_tokens")}
            | {"xargs": {k: v for k, v in (params.extra_args or {}).items() if k == "mine"}}
        )
        self.core.finish(request, tokens)


async def texts(server: Server, request: dict[str, Any]) -> list[str]:
    """The choices that a client gets, by index, streamed or not."""
    answer = await server.post(PATH, request)
    assert answer.status == 200, answer.body
    if request.get("stream"):
        lines = [line.removeprefix(b"data: ") for line in answer.body.splitlines() if line]
        found = [c for line in lines if line != b"[DONE]" for c in json.loads(line)["choices"]]
    else:
        found = json.loads(answer.body)["choices"]
    joined: dict[int, str] = {}
    for choice in found:
        joined[choice["index"]] = joined.get(choice["index"], "") + choice["text"]
    return [joined[index] for index in sorted(joined)]


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


class Pair(NamedTuple):
    """A decode server and one without a connector, which live in `loop`."""

    loop: asyncio.AbstractEventLoop
    decode: Server
    plain: Server

    def run(self, test: Coroutine[Any, Any, None]) -> None:
        self.loop.run_until_complete(asyncio.wait_for(test, 60))


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """Two servers for many requests: to build one takes longer than what a test asks of it."""
    loop = asyncio.new_event_loop()
    with contextlib.closing(loop):
        stack = contextlib.AsyncExitStack()
        decode, plain = (
            loop.run_until_complete(stack.enter_async_context(serving(connector=connector)))
            for connector in ("NixlConnector", None)
        )
        yield Pair(loop, decode, plain)
        loop.run_until_complete(stack.aclose())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize(
    ("n", "prompts"), [(2, 1), (8, 1), (1, 2), (1, 3), (2, 2), (8, 2), (2, 3), (8, 3)]
)
def test_same_tokens_as_a_plain_server(
    pair: Pair, n: int, prompts: int, seed: int | None, stream: bool
) -> None:
    prompt = PROMPTS[:prompts] if prompts > 1 else PROMPTS[0]
    request = body(
        PATH, prompt=prompt, n=n, seed=seed, stream=stream, best_of=n, vllm_xargs={"mine": 1}
    )

    async def test() -> None:
        engine, plain = Engine(pair.decode, PROMPTS[0]), Engine(pair.plain, [])
        received = await texts(pair.decode, request)
        expected = await texts(pair.plain, {**request, "kv_transfer_params": None})
        assert engine.heard == {REMOTE["remote_request_id"]: 1}
        assert received == expected
        assert len(received) == n * prompts
        assert engine.asked == plain.asked

    pair.run(test())


@pytest.mark.parametrize("conversations", [2, 3])
def test_a_batch_of_conversations(conversations: int) -> None:
    """The prefill server has one conversation's KV; the others' would be read from its blocks."""
    said = [[{"role": "user", "content": text}] for text in ("one", "two", "three")]
    request = body("/v1/chat/completions", messages=said[:conversations])

    async def answers(server: Server, params: object) -> list[str]:
        answer = await server.post(BATCH, {**request, "kv_transfer_params": params})
        assert answer.status == 200, answer.body
        return [choice["message"]["content"] for choice in json.loads(answer.body)["choices"]]

    async def test() -> None:
        async with serving(connector=None) as server:
            Engine(server, [])
            expected = await answers(server, None)
            prefilled = server.core.requests[0].prompt_token_ids or []
        async with serving() as server:
            engine = Engine(server, prefilled)
            received = await answers(server, REMOTE)
        assert engine.heard == {REMOTE["remote_request_id"]: 1}
        assert received == expected
        assert len(received) == conversations

    run(test())


@pytest.mark.parametrize("last", [0, 1, 2])
@pytest.mark.parametrize("prompts", [1, 2])
def test_prefill_server_holds_what_its_answer_names(prompts: int, last: int) -> None:
    """What a router sends to the prefill server: the client's request with one token."""
    prompt = PROMPTS[:prompts] if prompts > 1 else PROMPTS[0]
    held: set[str] = set()
    waiting: list[tuple[EngineCoreRequest, dict[str, Any] | None]] = []

    async def test() -> None:
        async with serving() as server:
            server.core.answers = False

            async def prefill(request: EngineCoreRequest) -> None:
                assert request.sampling_params is not None
                extra = request.sampling_params.extra_args or {}
                answer = None
                if (extra.get("kv_transfer_params") or {}).get("do_remote_decode"):
                    held.add(request.request_id)
                    answer = {"do_remote_prefill": True, "remote_request_id": request.request_id}
                waiting.append((request, answer))
                if len(waiting) == 3 * prompts:
                    # One child of each prompt comes last.
                    for late in (False, True):
                        for i, (each, said) in enumerate(waiting):
                            if (i % 3 == last) == late:
                                server.core.finish(each, kv_transfer_params=said)

            server.core.on_add = prefill
            params = {"do_remote_decode": True, "do_remote_prefill": False}
            answer = await server.post(PATH, body(PATH, params, prompt=prompt, n=3, max_tokens=1))
        assert answer.status == 200
        named = json.loads(answer.body)["kv_transfer_params"]
        assert named is not None, "the decode server is told nothing"
        assert held == {named["remote_request_id"]}

    run(test())


def test_turn_after_a_tool_call_reads_nothing() -> None:
    """A built-in tool's result makes another prompt, whose KV nobody has prefilled."""

    class TwoTurns:
        kv_transfer_params = None
        turns = 0

        def append_output(self, output: object) -> None:
            self.turns += 1

        def need_builtin_tool_call(self) -> bool:
            return self.turns < 2

        async def call_tool(self) -> list[object]:
            return []

        def append_tool_output(self, output: object) -> None:
            pass

    async def test() -> None:
        async with serving() as server:
            engine = Engine(server, PROMPTS[0])
            from vllm import inputs
            from vllm.sampling_params import RequestOutputKind, SamplingParams

            tokens_input = getattr(inputs, "tokens_input", None) or inputs.token_inputs  # 0.18.x
            params = SamplingParams(
                max_tokens=2,
                output_kind=RequestOutputKind.FINAL_ONLY,
                extra_args={"kv_transfer_params": dict(REMOTE)},
            )
            serving_responses = server.app.state.openai_serving_responses
            async for _ in serving_responses._generate_with_builtin_tools(
                "resp", tokens_input(PROMPTS[0]), params, TwoTurns()
            ):
                pass
        assert len(engine.asked) == 2
        assert engine.heard == {REMOTE["remote_request_id"]: 1}

    run(test())

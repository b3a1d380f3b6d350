"""A request that was refused is sent again, with the same `kv_transfer_params`.

Routers do that: after 429 and 503, after a lost connection, or when somebody has put the request
right. Stock P holds the blocks until they are read, so the second request is answered well.
However patched frees them, what it answers must be as good: it reads only what P still holds, and
computes the rest.

P is a stand-in that knows what frees its blocks: that it was told so, or that a read is complete.
From then on its blocks hold other prompts.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from vllm.v1.engine.core import EngineCore

from tests.parity.scenario import LeftOutError, Observed, at_least, scenario
from tests.parity.visits import serving
from tests.support.idle_engine import IdleEngine
from tests.support.nixl_worker import connect, nixl_of
from tests.support.serving_app import ENDPOINTS, MAX_MODEL_LEN, REMOTE, Answer, Server, body

COMPLETIONS, CHAT, RESPONSES, MESSAGES, GENERATE = ENDPOINTS
TOKENS = 40  # of the prompt: three blocks
RANK = "X-data-parallel-rank"

_TEXT = "x" * (TOKENS - len("user:;"))
PROMPTS: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "x" * TOKENS},
    CHAT: {"messages": [{"role": "user", "content": _TEXT}]},
    RESPONSES: {"input": _TEXT},
    MESSAGES: {"messages": [{"role": "user", "content": _TEXT}]},
    GENERATE: {"token_ids": [3] * TOKENS},
}


class Prefill:
    """P, as far as one of its requests goes.

    Attributes:
        freed: it was told that nobody will read the blocks, and has given them to others.
        read: somebody has begun to read them while it held them.
        stale: somebody has begun to read them later.
    """

    def __init__(self, request_id: str, *engines: IdleEngine) -> None:
        self.request_id = request_id.encode()
        self.freed = self.read = self.stale = False
        self._nixls = [nixl_of(engine.worker) for engine in engines]
        for nixl in self._nixls:
            nixl.on["send_notif"] = self._told
            nixl.on["make_prepped_xfer"] = self._begun

    def _told(self, agent: str, words: bytes) -> None:
        self.freed = self.freed or words.startswith(self.request_id + b":")

    def _begun(self, agent: str, local: object, remote: object, words: bytes) -> None:
        if words.startswith(self.request_id + b":"):
            heard = (one for nixl in self._nixls for all_ in nixl.heard.values() for one in all_)
            self.freed = self.freed or words in heard  # of a read that is complete
            self.stale = self.stale or self.freed
            self.read = self.read or not self.freed


def decode_engine() -> IdleEngine:
    """D's engine core with its worker, which has met P before."""
    engine = IdleEngine()
    connect(engine.worker, REMOTE["remote_engine_id"])
    return engine


async def hand_over(server: Server, *engines: IdleEngine) -> dict[str, tuple[int, int]]:
    """Give the engines what the server has sent, and let them work until they are idle.

    Returns:
        What was computed first: request -> first token and the one after the last.
    """
    await asyncio.sleep(0.05)  # what the server does after its answer
    await server.settled()
    computed: dict[str, tuple[int, int]] = {}
    for request in server.core.requests:
        engines[(request.data_parallel_rank or 0) % len(engines)].add(request)
    for engine in engines:
        for _ in range(20):
            if not engine.scheduler.has_requests():
                break
            computed = engine.step().computed | computed
            nixl = nixl_of(engine.worker)
            nixl.finish(*nixl.in_flight())
    server.core.reset()
    return computed


def outcome(prefill: Prefill, computed: dict[str, tuple[int, int]], *engines: IdleEngine) -> Any:  # noqa: ANN401
    """How a request that D was sent came out."""
    good = []
    starts = [start for start, end in computed.values() if end == TOKENS]
    if starts and not prefill.stale and (starts[0] == 0 or prefill.read):
        good.append("the right tokens")
    if not any(engine.scheduler.has_requests() for engine in engines):
        good.append("the engine comes to rest")
    return at_least(good)


def good_body(path: str, params: dict[str, Any] = REMOTE, **changes: Any) -> dict[str, Any]:  # noqa: ANN401
    """A request for `path` whose prompt P has computed."""
    return body(path, copy.deepcopy(params), **PROMPTS[path]) | changes


Refusal = Callable[[Server, str], Awaitable[Answer]]


async def _other_model(server: Server, path: str) -> Answer:
    return await server.post(path, good_body(path, model="no-such-model"))


async def _too_many_tokens(server: Server, path: str) -> Answer:
    request = good_body(path)
    target = request["sampling_params"] if path == GENERATE else request
    name = "max_output_tokens" if path == RESPONSES else "max_tokens"
    target[name] = MAX_MODEL_LEN + 1
    return await server.post(path, request)


async def _another_type(server: Server, path: str) -> Answer:
    return await server.post(path, good_body(path, model=["tiny"]))


async def _no_such_rank(server: Server, path: str) -> Answer:
    return await server.post(path, good_body(path), headers=[(RANK, "7")])


async def _lost_before_it_is_sent(server: Server, path: str) -> Answer:
    server.core.ready.clear()
    answer = await server.post(path, good_body(path), leaves=server.core.asked.wait())
    server.core.ready.set()
    return answer


async def _sending_fails(server: Server, path: str) -> Answer:
    failures = [RuntimeError("a hiccup")]

    async def fail(request: object) -> None:
        if failures:
            raise failures.pop()

    server.core.on_add = fail
    return await server.post(path, good_body(path))


async def _queue_is_full(server: Server, path: str) -> Answer:
    try:
        from vllm.exceptions import QueueOverflowError
    except ImportError:
        raise LeftOutError("this release has no limit for its queue") from None

    def full(*_: object, **__: object) -> None:
        raise QueueOverflowError("the queue is full; try again later")

    check, server.engine.check_admission = server.engine.check_admission, full
    try:
        return await server.post(path, good_body(path))
    finally:
        server.engine.check_admission = check


REFUSALS: dict[str, Refusal] = {
    "other model": _other_model,
    "too many tokens": _too_many_tokens,
    "a field of another type": _another_type,
    "no such rank": _no_such_rank,
    "lost before it is sent": _lost_before_it_is_sent,
    "sending fails": _sending_fails,
    "queue is full": _queue_is_full,
}


@scenario(*REFUSALS)
async def sent_again(refusal: str) -> Observed:
    """Refused once, put right, sent again to the same server."""
    observed: dict[str, Observed] = {}
    for path in ENDPOINTS:
        engine = decode_engine()
        prefill = Prefill(REMOTE["remote_request_id"], engine)
        async with serving(ranks=2) as server:
            first = await REFUSALS[refusal](server, path)
            await hand_over(server, engine)
            second = await server.post(path, good_body(path))
            computed = await hand_over(server, engine)
        observed[path] = {
            "first": first.status,
            "second": second.status,
            "outcome": outcome(prefill, computed, engine),
        }
    return observed


@scenario("NixlConnector", "MultiConnector")
async def sent_to_the_other_server(connector: str) -> Observed:
    """Two API servers of one engine, as --api-server-count 2 starts them."""
    engine = decode_engine()
    prefill = Prefill(REMOTE["remote_request_id"], engine)
    async with serving(connector=connector) as one, serving(connector=connector) as other:
        first = await _other_model(one, CHAT)
        await hand_over(one, engine)
        second = await other.post(CHAT, good_body(CHAT))
        computed = await hand_over(other, engine)
        return {
            "statuses": [first.status, second.status],
            "outcome": outcome(prefill, computed, engine),
        }


@scenario()
async def sent_to_the_other_rank() -> Observed:
    """Two data-parallel engines; the router chooses another one for the second try."""
    engines = [decode_engine(), decode_engine()]
    prefill = Prefill(REMOTE["remote_request_id"], *engines)
    statuses = []
    async with serving(ranks=2) as server:
        _several_cores(server, *engines)
        for rank, model in (("0", "no-such-model"), ("1", "tiny")):
            request = good_body(COMPLETIONS, model=model)
            answer = await server.post(COMPLETIONS, request, headers=[(RANK, rank)])
            statuses.append(answer.status)
            computed = await hand_over(server, *engines)
        return {"statuses": statuses, "outcome": outcome(prefill, computed, *engines)}


def _several_cores(server: Server, *engines: IdleEngine) -> None:
    """Let the server's client ask each engine core, as that for data parallelism can."""

    async def call(method: str, *args: object, engine: IdleEngine) -> object:
        return getattr(EngineCore, method)(engine, *args)

    client: Any = server.engine.engine_core
    client.core_engines, client._call_utility_async = engines, call


@scenario()
async def refused_many_times() -> Observed:
    """And then served, other requests of P in between."""
    engine = decode_engine()
    prefill = Prefill(REMOTE["remote_request_id"], engine)
    statuses = []
    async with serving() as server:
        for i in range(5):
            statuses.append((await _other_model(server, COMPLETIONS)).status)
            other = {**REMOTE, "remote_request_id": f"other-{i}"}
            request = good_body(COMPLETIONS, other, model="no-such-model")
            statuses.append((await server.post(COMPLETIONS, request)).status)
            await hand_over(server, engine)
        answer = await server.post(COMPLETIONS, good_body(COMPLETIONS))
        computed = await hand_over(server, engine)
        return {
            "statuses": [*statuses, answer.status],
            "outcome": outcome(prefill, computed, engine),
        }


@scenario()
async def another_request_of_the_same_p() -> Observed:
    """It was never refused: it is read, not computed, whatever was refused before."""
    engine = decode_engine()
    other = {**REMOTE, "remote_request_id": "cmpl-p-1", "remote_block_ids": [[7, 8, 9]]}
    prefill = Prefill("cmpl-p-1", engine)
    async with serving() as server:
        first = await _other_model(server, COMPLETIONS)
        await hand_over(server, engine)
        second = await server.post(COMPLETIONS, good_body(COMPLETIONS, other))
        computed = await hand_over(server, engine)
        return {
            "statuses": [first.status, second.status],
            "outcome": outcome(prefill, computed, engine),
            "read": prefill.read,
        }


@scenario(*ENDPOINTS)
async def never_refused(path: str) -> Observed:
    """The plain case: one request, one read, and P hears of its end."""
    engine = decode_engine()
    prefill = Prefill(REMOTE["remote_request_id"], engine)
    async with serving() as server:
        answer = await server.post(path, good_body(path))
        computed = await hand_over(server, engine)
        return {
            "status": answer.status,
            "outcome": outcome(prefill, computed, engine),
            "read": prefill.read,
            "told": _heard(engine),
        }


def _heard(*engines: IdleEngine) -> Sequence[str]:
    return [
        f"{agent}: {word.decode()}"
        for engine in engines
        for agent, words in sorted(nixl_of(engine.worker).heard.items())
        for word in words
    ]


@scenario("the same", "other blocks", "a lost answer")
async def served_and_sent_again(how: str) -> Observed:
    """Served once already. What stock does then is not always right, and no worse here."""
    engine = decode_engine()
    prefill = Prefill(REMOTE["remote_request_id"], engine)
    async with serving() as server:
        await server.post(COMPLETIONS, good_body(COMPLETIONS))
        await hand_over(server, engine)
        params = {**REMOTE, "remote_block_ids": [[4, 5, 6]]} if how == "other blocks" else REMOTE
        request = json.dumps(good_body(COMPLETIONS, params)).encode()
        answer = await server.post(COMPLETIONS, request)
        computed = await hand_over(server, engine)
        return {"status": answer.status, "outcome": outcome(prefill, computed, engine)}

"""Engine clients other than `AsyncLLM` in its own process, and what they have the core do.

An API server takes any `EngineClient`: vLLM's own, one that forwards to it from a task of its own,
one that somebody wrote outside vLLM. A request that such a client serves is served, and nobody
else may conclude that it was refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

from vllm.engine.protocol import EngineClient
from vllm.entrypoints.openai.api_server import build_app, init_app_state
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import DPLBAsyncMPClient

from tests.parity.scenario import Observed, scenario
from tests.parity.visits import OWN, seen, serving, visit
from tests.support import serving_app
from tests.support.release import since
from tests.support.serving_app import ENDPOINTS, MAX_MODEL_LEN, REMOTE, Server, body

COMPLETIONS = "/v1/completions"
GOOD_IDS = [5, 6, 7]


class Forwarding(EngineClient):  # type: ignore[misc, unused-ignore]
    """An engine client that is no `AsyncLLM`: what the protocol demands, done by another one."""

    def __init__(self, inner: AsyncLLM) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - configuration and parts
        return getattr(self._inner, name)


def _forward(name: str, given: Any) -> Any:  # noqa: ANN401 - a method or a property
    if isinstance(given, property):
        return property(lambda self: getattr(self._inner, name))

    def method(self: Forwarding, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        return getattr(self._inner, name)(*args, **kwargs)

    return method


for _name in EngineClient.__abstractmethods__:
    setattr(Forwarding, _name, _forward(_name, inspect.getattr_static(EngineClient, _name)))
Forwarding.__abstractmethods__ = frozenset()


class Knowing(Forwarding):
    """Has the method that upstream's later protocol demands, and our patched one."""

    async def notify_kv_transfer_request_rejected(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        await self._inner.notify_kv_transfer_request_rejected(*args, **kwargs)


class OwnTask(Knowing):
    """Hands every request to one task that is older than all of them, as a queue's worker does.

    What a request's handler leaves in its context is not to be found there.
    """

    def __init__(self, inner: AsyncLLM) -> None:
        super().__init__(inner)
        self._queue: asyncio.Queue[tuple[Any, Any, asyncio.Queue[Any]]] = asyncio.Queue()
        self._tasks = {asyncio.create_task(self._work())}

    async def _work(self) -> None:
        while True:
            args, kwargs, results = await self._queue.get()
            try:
                async for output in self._inner.generate(*args, **kwargs):
                    results.put_nowait(output)
                results.put_nowait(None)
            except Exception as error:
                results.put_nowait(error)

    async def generate(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:  # noqa: ANN401
        results: asyncio.Queue[Any] = asyncio.Queue()
        self._queue.put_nowait((args, kwargs, results))
        while (result := await results.get()) is not None:
            if isinstance(result, Exception):
                raise result
            yield result

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()


class Parts(Knowing):
    """Adds the request in one task and reads its outputs in another, as a multiplexer does."""

    async def generate(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:  # noqa: ANN401
        collector = self._inner.generate(*args, **kwargs)
        while True:
            try:
                yield await asyncio.create_task(anext(collector))
            except StopAsyncIteration:
                return


WRONG: dict[str, dict[str, Any]] = {
    "other model": {"model": "no-such-model"},
    "too many tokens": {"max_tokens": MAX_MODEL_LEN + 1, "max_output_tokens": -1},
}

CLIENTS: dict[str, Any] = {
    "AsyncLLM": lambda inner: inner,
    # From 0.21.0 on the protocol demands it.
    "forwarding": Knowing if since("0.21.0") else Forwarding,
    "forwarding all": Knowing,
    "own task": OwnTask,
    "several tasks": Parts,
}


@contextlib.asynccontextmanager
async def serving_by(client: str, connector: str) -> AsyncIterator[Server]:
    """A decode server over one of `CLIENTS`."""
    # Every route and handler has to be given the client, so the application is made anew.
    async with serving(connector=connector) as server:
        made = CLIENTS[client](server.engine)
        args = serving_app._arguments()
        model = {"model_config": server.engine.model_config} if serving_app._WITH_MODEL else {}
        app = build_app(args, ("generate",), **model)
        await init_app_state(made, app.state, args, ("generate",))
        app.state.server = server.app.state.server
        try:
            yield Server(app, server.engine, server.core)
        finally:
            if isinstance(made, OwnTask):
                made.stop()


@scenario(*(f"{client}, {connector}" for client in CLIENTS for connector in (*OWN, "none")))
async def p_waits_and_the_request_is_served(variant: str) -> Observed:
    """The core is sent the one request that reads, and nothing that tells P."""
    observed: dict[str, Observed] = {}
    async with serving_by(*variant.split(", ")) as server:
        for path in ENDPOINTS:
            for stream in (False, True):
                raw = json.dumps(body(path, REMOTE, stream=stream or None)).encode()
                answer = await visit(server, "POST", path, raw)
                observed[f"{path}, {stream=}"] = seen(answer, server.core)
    return observed


@scenario(*(f"{client}, {connector}" for client in CLIENTS for connector in (*OWN, "none")))
async def refused(variant: str) -> Observed:
    """The answers are stock's, and whoever is told on stock is told."""
    observed: dict[str, Observed] = {}
    client, connector = variant.split(", ")
    async with serving_by(client, connector) as server:
        for path in ENDPOINTS:
            for name, changes in WRONG.items():
                raw = json.dumps(body(path, REMOTE) | changes).encode()
                answer = await visit(server, "POST", path, raw)
                observed[f"{path}, {name}"] = seen(
                    answer, server.core, may_tell=connector != "none"
                )
    return observed


@scenario(*CLIENTS, shows={"K05 >=0.21.0": "P is told although the engine core has the request"})
async def a_client_leaves(client: str) -> Observed:
    """After its request was sent: the core aborts it, and that is all."""
    async with serving_by(client, "NixlConnector") as server:
        server.core.answers = False
        added = asyncio.Event()

        async def note(_: object) -> None:
            added.set()

        server.core.on_add = note
        answer = await server.post(COMPLETIONS, body(COMPLETIONS, REMOTE), leaves=added.wait())
        await asyncio.sleep(0.1)
        await server.settled()
        return seen(answer, server.core)


@scenario()
async def requests_are_balanced() -> Observed:
    """Which of two data-parallel engines the client's own balancing gives each request to."""
    return await _chosen()


@scenario(shows={"K05 >=0.21.0": "stock's own stand-ins of refused requests count in balancing"})
async def requests_are_balanced_with_refused_ones_in_between() -> Observed:
    """As before, for the good ones."""
    return await _chosen(refused=True)


async def _chosen(*, refused: bool = False) -> list[str]:
    chooser: Any = object.__new__(DPLBAsyncMPClient)
    width = 3 if "kv_cache_usage" in inspect.getsource(type(chooser)) else 2
    vars(chooser).update(
        core_engines=["0", "1"],
        lb_engines=[[0] * width, [0] * width],
        client_count=1,
        client_index=0,
        eng_start_index=0,
        reqs_in_flight={},
        streaming_reqs=set(),
        engine_inflight=Counter(),
    )
    chosen: list[str] = []

    async def choose(request: EngineCoreRequest) -> None:
        engine = chooser.get_core_engine_for_request(request)
        if request.prompt_token_ids == GOOD_IDS:
            chosen.append(engine)

    async with serving(ranks=2) as server:
        server.core.on_add = choose
        for _ in range(6):
            await server.post(COMPLETIONS, body(COMPLETIONS, None, prompt=GOOD_IDS))
            if refused:
                await server.post(COMPLETIONS, body(COMPLETIONS, REMOTE, model="no-such-model"))
    return chosen

"""vLLM's gRPC server: the servicer of smg-grpc-servicer, called over gRPC.

It is a client of the engine that nobody here wrote. It calls what upstream's later protocol has,
where it finds that, so it does other things with a patched build than with stock up to 0.20.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from typing import Any

from tests.parity.scenario import LeftOutError, Observed, said, scenario
from tests.parity.visits import OWN, seen, serving
from tests.support.serving_app import MAX_MODEL_LEN, REMOTE, Answer, Server

GOOD_IDS = [5, 6, 7]

PARAMS: dict[str, dict[str, Any] | None] = {
    "P waits": REMOTE,
    "prefill": {"do_remote_decode": True, "do_remote_prefill": False},
    "nobody waits": None,
}

WRONG: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": -1.0},
    "too many tokens": {"max_tokens": MAX_MODEL_LEN + 1},
    "prompt too long": {"ids": [3] * (MAX_MODEL_LEN + 1)},
    "token id out of range": {"ids": [999_999]},
}


class Client:
    """A router that speaks to the servicer over a connection of its own."""

    def __init__(self, server: Server, messages: Any, stub: Any) -> None:  # noqa: ANN401
        self.core = server.core
        self._messages, self._stub = messages, stub

    def call(self, params: object, *, stream: bool = False, **changes: Any) -> Any:  # noqa: ANN401
        """Begin a request; what comes back can be iterated over and cancelled."""
        ids = changes.pop("ids", GOOD_IDS)
        sampling = self._messages.SamplingParams(**{"max_tokens": 2} | changes)
        request = self._messages.GenerateRequest(
            request_id="of-the-router",
            tokenized=self._messages.TokenizedInput(input_ids=ids),
            sampling_params=sampling,
            stream=stream,
        )
        if params is not None:
            request.kv_transfer_params_json = json.dumps(params)
        return self._stub.Generate(request)

    async def visit(self, params: object, **changes: Any) -> Answer:  # noqa: ANN401
        """What such a request is answered: a status of gRPC's, and every message."""
        return await heard(self.call(params, **changes))


async def heard(call: Any) -> Answer:  # noqa: ANN401 - grpc.aio's call
    """Wait for the end of a call."""
    import grpc

    answer = Answer()
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
        async for message in call:
            answer.body += str(message).encode()
    answer.status = (await call.code()).value[0]
    answer.body += (await call.details() or "").encode()
    await asyncio.sleep(0.05)  # what the servicer does after its answer
    return answer


@contextlib.asynccontextmanager
async def serving_grpc(connector: str) -> AsyncIterator[Client]:
    """The servicer on a port of this machine's, before a scripted engine core.

    Raises:
        LeftOutError: the release or the environment has no servicer.
    """
    try:
        import grpc
        from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc
        from smg_grpc_servicer.vllm.servicer import VllmEngineServicer
    except ImportError as error:
        raise LeftOutError(f"this release cannot import the servicer: {said(error)}") from error
    async with serving(connector=connector) as server:
        listener = grpc.aio.server()
        servicer = VllmEngineServicer(server.engine, time.time())
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(servicer, listener)
        port = listener.add_insecure_port("127.0.0.1:0")
        await listener.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
                yield Client(server, vllm_engine_pb2, stub)
        finally:
            await listener.stop(None)


@scenario(*(f"{whose}, {connector}" for whose in PARAMS for connector in (*OWN, "none")))
async def served(variant: str) -> Observed:
    """The core is sent one request, with the parameters, and nothing that tells P."""
    whose, connector = variant.split(", ")
    observed: dict[str, Observed] = {}
    async with serving_grpc(connector) as client:
        for stream in (False, True):
            answer = await client.visit(PARAMS[whose], stream=stream)
            observed[f"{stream=}"] = seen(answer, client.core)
    return observed


@scenario(*(f"{whose}, {connector}" for whose in PARAMS for connector in (*OWN, "none")))
async def refused(variant: str) -> Observed:
    """The answers are stock's, and whoever is told on stock is told."""
    whose, connector = variant.split(", ")
    observed: dict[str, Observed] = {}
    may_tell = whose == "P waits" and connector in OWN
    async with serving_grpc(connector) as client:
        for stream in (False, True):
            for name, changes in WRONG.items():
                answer = await client.visit(PARAMS[whose], stream=stream, **changes)
                observed[f"{name}, {stream=}"] = seen(answer, client.core, may_tell=may_tell)
    return observed


@scenario(*OWN)
async def sending_fails(connector: str) -> Observed:
    """A fault of the server, after which a router sends the request to another one."""

    failures = [RuntimeError("a hiccup")]

    async def fail(_: object) -> None:
        if failures:
            raise failures.pop()

    async with serving_grpc(connector) as client:
        client.core.on_add = fail
        return seen(await client.visit(REMOTE), client.core)


@scenario(*OWN)
async def the_router_leaves(connector: str) -> Observed:
    """Before the engine core is sent the request, and afterwards."""
    observed: dict[str, Observed] = {}
    async with serving_grpc(connector) as client:
        core = client.core
        for when in ("before it is sent", "after it was sent"):
            core.answers = False
            reached = asyncio.Event()
            if when == "before it is sent":
                core.ready.clear()
                reached = core.asked
            else:

                async def note(_: object, reached: asyncio.Event = reached) -> None:
                    reached.set()

                core.on_add = note
            call = client.call(REMOTE)
            await asyncio.wait_for(reached.wait(), 20)
            call.cancel()
            answer = await heard(call)
            await asyncio.sleep(0.2)  # until the servicer hears of it
            core.ready.set()
            await asyncio.sleep(0.1)
            observed[when] = seen(answer, core)
    return observed

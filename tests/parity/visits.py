"""Visits to vLLM's own API server, and what can be seen of them on both of its ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Collection, Sequence
from typing import Any
from unittest import mock

import msgspec
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from tests.parity.scenario import LeftOutError, Observed, at_least, scrubbed
from tests.support import serving_app
from tests.support.harness import HarnessError
from tests.support.serving_app import Answer, ScriptedCore, Server

CONNECTORS = (
    "none",
    "NixlConnector",
    "MultiConnector",
    "MooncakeConnector",
    "LMCacheConnectorV1",
    "NixlPushConnector",
)
"""An API server only knows a connector's name, so these need nothing that is not installed."""

OWN = ("NixlConnector", "MultiConnector")
"""The connectors whose refused requests are the business of our fixes."""


@contextlib.asynccontextmanager
async def serving(
    *flags: str, connector: str = "NixlConnector", ranks: int = 1
) -> AsyncIterator[Server]:
    """As `tests.support.serving_app.serving`, with any of `CONNECTORS`.

    Raises:
        LeftOutError: the release has no such connector.
    """
    if connector not in ("none", *KVConnectorFactory._registry):
        raise LeftOutError(f"this release has no {connector}")
    plain = serving_app.serving_config
    children = ("NixlConnector", "ExampleConnector") if connector == "MultiConnector" else ()

    def config(_: object, *, ranks: int) -> Any:  # noqa: ANN401 - VllmConfig
        made = plain(None, ranks=ranks)
        made.kv_transfer_config = connector != "none" and KVTransferConfig(
            kv_connector=connector,
            kv_role="kv_both",
            engine_id="engine-d",
            kv_connector_extra_config={
                "connectors": [{"kv_connector": child, "kv_role": "kv_both"} for child in children]
            }
            if children
            else {},
        )
        made.kv_transfer_config = made.kv_transfer_config or None
        return made

    with mock.patch.object(serving_app, "serving_config", config):
        async with serving_app.serving(*flags, ranks=ranks) as server:
            yield server


async def visit(
    server: Server,
    method: str,
    path: str,
    body: bytes = b"",
    headers: Sequence[tuple[str, str]] = (),
) -> Answer:
    """Send one request of any kind and wait until the server is done with it."""
    answer = Answer()
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()  # the client stays
        raise HarnessError("a client that is gone", "one that stays")

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
        else:
            answer.body += message.get("body", b"")

    given = {"content-type": "application/json", **dict(headers)}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.lower().encode(), value.encode()) for name, value in given.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
        "state": {},
    }
    try:
        async with asyncio.timeout(20) if hasattr(asyncio, "timeout") else _nothing():
            await server.app(scope, receive, send)
    except TimeoutError:
        answer.body += b" ... and then nothing for 20 seconds"
    except Exception:  # a server turns what escapes the application into a log line
        answer.closed = True
    await server.settled()
    return answer


@contextlib.asynccontextmanager
async def _nothing() -> AsyncIterator[None]:
    yield


def seen(answer: Answer, core: ScriptedCore, *, may_tell: bool = False) -> Observed:
    """What a client and the engine core saw of a visit; the core then forgets it.

    `may_tell`: a prefill server waits for the request and the visit may be a refusal, of which
    patched tells it. Otherwise it hears what it hears on stock.
    """
    told = [json.dumps(params, sort_keys=True) for params in core.told]
    observed = {
        "status": answer.status,
        "body": scrubbed(answer.body),
        # Up to 0.22 some refusals close the connection, and patched mends that.
        "connection": at_least([] if answer.closed else ["stays"]),
        "computed": [sent(request) for request in core.admitted],
        "told": at_least(told) if may_tell else told,
        "aborted": len(core.aborted),
    }
    core.reset()
    return observed


def sent(request: msgspec.Struct) -> Observed:
    """What the engine core is sent, field by field, without what is random or a default."""
    random: Collection[str] = ("request_id", "external_req_id", "arrival_time")
    defaults = dict(
        zip(
            request.__struct_fields__[-len(request.__struct_defaults__) :],
            request.__struct_defaults__,
            strict=True,
        )
    )
    return {
        name: scrubbed(repr(value))
        for name in request.__struct_fields__
        if name not in random
        and ((value := getattr(request, name)) is not None)
        and not (name in defaults and defaults[name] == value)
    }

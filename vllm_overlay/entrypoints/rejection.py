# SPDX-License-Identifier: Apache-2.0
"""All releases: a request turned down for good frees the KV blocks that wait elsewhere.

`KVTransferRoute` is the route class of the endpoints that accept `kv_transfer_params`. It
surrounds everything that belongs to a request (reading and validating its body, the handler, the
whole of a streamed answer, the client going away) and so needs to know none of the reasons for a
rejection. Two facts decide. Was the engine core sent the request (see
`vllm_overlay.v1.engine.admission`)? Then it answers for the blocks. Was the client told that only
another request can succeed (see `vllm_overlay.entrypoints.verdict`)? Then, and only then, the
prefill server hears of it. In every other case its own lease decides, as without this module.

Telling it makes this server connect to a host that the client names. vLLM lets clients without
the API key reach /invocations, and up to 0.21.0 /inference/v1/generate; nothing is told for them
where a key is configured.
"""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any

from fastapi import Request
from fastapi.routing import APIRoute
from vllm.logger import init_logger
from vllm.utils import random_uuid

from vllm_overlay.distributed.kv_transfer.fix_counts import Acted, count
from vllm_overlay.engine.protocol import KVTransferNotifier
from vllm_overlay.entrypoints.kept_body import KeptBody
from vllm_overlay.entrypoints.verdict import Verdict
from vllm_overlay.logging_utils.bounded_log import BoundedLog
from vllm_overlay.v1.engine.admission import open_exchange
from vllm_overlay.v1.engine.stand_in import takes_stand_ins, transfer_config

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send
    from vllm.engine.protocol import EngineClient

log = BoundedLog(init_logger(f"vllm.{__name__}"))

_GENERATING = frozenset(
    {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/responses",
        "/v1/messages",
        "/cohere/v2/chat",
        "/inference/v1/generate",
        "/invocations",
    }
)
"""The endpoints that can read a prefill server's blocks. Their routers have others, which count
tokens, fetch or cancel a response, abort a request: a refusal there refuses no such read."""

_ID_LENGTH = 64
"""Characters of a client's own id that are kept in ours."""


class KVTransferRoute(APIRoute):
    """A route whose requests reach the engine core or, refused for good, free what waits."""

    @property
    def generates(self) -> bool:
        """Whether a prefill server's blocks may be read for requests to this endpoint."""
        return self.path in _GENERATING

    def transfer_params(self, body: dict[str, Any]) -> object:
        """Return what the handler would use of a body as its transfer parameters."""
        return body.get("kv_transfer_params")

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request (ASGI)."""
        engine = transferring_engine(scope)
        if engine is None or not self.generates or scope.get("method") not in self.methods:
            await super().handle(scope, receive, send)
            return
        body, verdict = KeptBody(), Verdict()

        async def receive_and_keep() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect":
                verdict.lose_client()
            elif message["type"] == "http.request":
                body.add(message.get("body", b""), more=message.get("more_body", False))
            return message

        async def send_and_note(message: Message) -> None:
            if not exchange.admitted:
                verdict.note(message)
            await send(message)

        with open_exchange(on_admission=body.clear) as exchange:
            try:
                await super().handle(scope, receive_and_keep, send_and_note)
            except Exception as error:
                if (
                    verdict.begun
                    or self._waiting(body) is None
                    or not await _answer_refusal(scope, receive, send_and_note, error)
                ):
                    raise
            # From 0.21.0 to 0.27.1 /v1/messages makes a 500 of what its handler refuses, and stock
            # frees the blocks all the same: the request cannot be served by sending it again.
            final = verdict.is_final or (verdict.is_fault and exchange.refused)
            if final and (params := self._waiting(body)) is not None:
                request = Request(scope)
                name = request.headers.get("X-Request-Id") or body.parsed.get("request_id")
                body.clear()
                await exchange.end(params, lambda: notify(engine, name, params, request))

    def _waiting(self, body: KeptBody) -> dict[str, Any] | None:
        """The transfer parameters of a body, if blocks wait for it on a prefill server."""
        return remote_prefill(self.transfer_params(body.parsed))


def transferring_engine(scope: Scope) -> EngineClient | None:
    """The engine, if its KV connector is one that we can have a prefill server told by.

    With any other everything is as on stock. A server that only renders prompts has no engine.
    """
    engine = getattr(scope["app"].state, "engine_client", None)
    return engine if takes_stand_ins(transfer_config(engine)) else None


async def _answer_refusal(scope: Scope, receive: Receive, send: Send, error: Exception) -> bool:
    """Answer `error` as the application would, if that is a refusal; return whether it was.

    Up to 0.25.1 vLLM has one handler for most such errors. Starlette raises what that one answers
    once more, and the HTTP server then closes the connection without having said so. A router
    that has put its next request on it loses that, and a prefill server keeps blocks for a
    request that never gets here. (Upstream registers the classes of refusals since.)
    """
    handler = scope["app"].exception_handlers.get(Exception)
    if not inspect.iscoroutinefunction(handler):
        return False
    response = await handler(Request(scope, receive), error)
    if response.status_code >= 500:  # that is to be seen in the log, as before
        return False
    await response(scope, receive, send)
    return True


def remote_prefill(params: object) -> dict[str, Any] | None:
    """`params` if they say that blocks wait on a prefill server, else None."""
    return params if isinstance(params, dict) and params.get("do_remote_prefill") else None


def _data_parallel_rank(request: Request | None) -> int | None:
    """The engine that the client's router asked for, from its header; None if it did not."""
    try:
        return int(request.headers["X-data-parallel-rank"]) if request is not None else None
    except (KeyError, ValueError):
        return None


def _has_key(request: Request) -> bool:
    """Whether a request shows the API key, where one is configured, asked for it or not.

    Ray Serve LLM calls handlers with requests that are in no application, SkyRL with what has a
    request's headers and no more; each has seen to that.
    """
    app: Any = getattr(request, "scope", {}).get("app")
    for middleware in app.user_middleware if app is not None else ():
        guard: Any = middleware.cls  # vLLM's own has moved between its modules
        if guard.__module__.startswith("vllm.") and hasattr(guard, "verify_token"):
            checks = guard(app, *middleware.args, **middleware.kwargs)
            return bool(checks.verify_token(request.headers))
    return True


def _readable(name: object) -> str:
    """A client's id, fit for a log line, or one of our own."""
    if not isinstance(name, str) or not name:
        return random_uuid()
    return re.sub(r"[^!-~]", "_", name[:_ID_LENGTH])


async def notify(
    engine: EngineClient, name: object, params: dict[str, Any], request: Request | None
) -> None:
    """Have a NIXL prefill server told through the engine.

    Args:
        engine: the engine client.
        name: how the client calls the request, if it does; only for logs.
        params: as the client sent them.
        request: the client's HTTP request, if it made one. Without the API key, where there is
            one, nothing is told.
    """
    if request is None or _has_key(request):
        await tell(engine, _readable(name), params, request)


async def tell(
    engine: EngineClient, request_id: str, params: dict[str, Any], request: Request | None
) -> None:
    """Tell the engine of a rejection as upstream does; a failure costs a log line, not the answer.

    An engine client that cannot tell anybody is not asked to, and one that another program wrote
    need not know how.
    """
    through = getattr(engine, "notify_kv_transfer_request_rejected", None)
    base = KVTransferNotifier.notify_kv_transfer_request_rejected
    if through is None or getattr(through, "__func__", None) is base:
        return
    try:
        await through(request_id, params, data_parallel_rank=_data_parallel_rank(request))
    except Exception:
        count(Acted.REJECTION_LOST)
        log.warning(
            "Could not tell the prefill server about rejected request %s; "
            "its KV blocks stay until the prefill server's own timeout.",
            request_id,
            exc_info=True,
        )

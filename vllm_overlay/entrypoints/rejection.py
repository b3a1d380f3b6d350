# SPDX-License-Identifier: Apache-2.0
"""Every way of turning a client's request down frees the KV blocks that wait for it elsewhere.

`KVTransferRoute` is the route class of the endpoints that accept `kv_transfer_params`. It
surrounds everything that belongs to a request (reading and validating its body, the handler, the
whole of a streamed answer, the client going away) and so needs to know none of the reasons for a
rejection. What it does know is whether the engine core was sent the request: see
`vllm_overlay.v1.engine.admission`.

Only clients that passed authentication get here. Who is not let in cannot make this server send
anything to anybody.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from fastapi import Request
from fastapi.routing import APIRoute
from vllm.logger import init_logger
from vllm.utils import random_uuid

from vllm_overlay.v1.engine.admission import open_exchange

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send
    from vllm.engine.protocol import EngineClient

logger = init_logger(f"vllm.{__name__}")


class KVTransferRoute(APIRoute):
    """A route whose requests either reach the engine core or free what waits for them."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request (ASGI)."""
        # A server that only renders prompts has no engine.
        engine: EngineClient | None = getattr(scope["app"].state, "engine_client", None)
        if engine is None or engine.vllm_config.kv_transfer_config is None:
            await super().handle(scope, receive, send)
            return
        body: list[bytes] = []

        async def receive_and_keep() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                body.append(message.get("body", b""))
            return message

        answered = False

        async def send_and_note(message: Message) -> None:
            nonlocal answered
            answered = True
            await send(message)

        async def reject() -> None:
            await _reject(engine, Request(scope), b"".join(body))

        with open_exchange() as exchange:
            try:
                await super().handle(scope, receive_and_keep, send_and_note)
            except Exception as error:
                if answered or not await _answer_refusal(scope, receive, send, error):
                    raise
            finally:
                await exchange.end(reject)


async def _answer_refusal(scope: Scope, receive: Receive, send: Send, error: Exception) -> bool:
    """Answer `error` as the application would, if that is a refusal; return whether it was.

    Up to 0.22 vLLM has one handler for all such errors. Starlette raises what that one answers
    once more, and the HTTP server then closes the connection without having said so. A router
    that has put its next request on it loses that, and a prefill server keeps blocks for a
    request that never gets here. (Upstream registers the classes of refusals since.)
    """
    handler = scope["app"].exception_handlers.get(Exception)
    if handler is None:
        return False
    response = await handler(Request(scope, receive), error)
    if response.status_code >= 500:  # that is to be seen in the log, as before
        return False
    await response(scope, receive, send)
    return True


async def _reject(engine: EngineClient, request: Request, body: bytes) -> None:
    parsed = _parse(body)
    params = remote_prefill(_params_in(parsed))
    if params is not None:
        name = parsed.get("request_id")
        await notify(
            engine,
            request.headers.get("X-Request-Id") or (name if isinstance(name, str) else None),
            params,
            data_parallel_rank(request),
        )


def _parse(body: bytes) -> dict[str, Any]:
    """The body as an object; empty if it is anything else. Rejected bodies may be."""
    if b"do_remote_prefill" not in body:  # most bodies, and cheaper than parsing them again
        return {}
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _params_in(body: dict[str, Any]) -> object:
    """The transfer parameters in a body: where token-level requests have them, or at the top."""
    sampling = body.get("sampling_params")
    extra = sampling.get("extra_args") if isinstance(sampling, dict) else None
    inner = extra.get("kv_transfer_params") if isinstance(extra, dict) else None
    return inner or body.get("kv_transfer_params")


def remote_prefill(params: object) -> dict[str, Any] | None:
    """`params` if they say that blocks wait on a prefill server, else None."""
    return params if isinstance(params, dict) and params.get("do_remote_prefill") else None


def data_parallel_rank(request: Request | None) -> int | None:
    """The engine that the client's router asked for, from its header; None if it did not."""
    try:
        return int(request.headers["X-data-parallel-rank"]) if request is not None else None
    except (KeyError, ValueError):
        return None


async def notify(
    engine: EngineClient, request_id: str | None, params: dict[str, Any], rank: int | None
) -> None:
    """Tell the prefill server through the engine; a failure costs a log line, not the answer."""
    request_id = request_id or random_uuid()
    try:
        await engine.notify_kv_transfer_request_rejected(
            request_id, params, data_parallel_rank=rank
        )
    except Exception:
        logger.warning(
            "Could not tell the prefill server about rejected request %s; "
            "its KV blocks stay until the prefill server's own timeout.",
            request_id,
            exc_info=True,
        )

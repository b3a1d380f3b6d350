"""The protocol that a client of a P/D deployment speaks, for tests that see each half of it."""

from __future__ import annotations

import json
import socket
import struct
import time
from typing import Any

from tests.pd.machine import free_ports
from tests.pd.server import Server, client
from tests.support.harness import HarnessError

Params = dict[str, Any]

REMOTE_DECODE: Params = {"do_remote_decode": True, "do_remote_prefill": False}
"""What P is asked for: keep the blocks, somebody comes for them."""


def body(prompt: object, tokens: int = 12, **more: object) -> dict[str, Any]:
    """Return the body of a greedy completion that names its tokens and never ends early."""
    greedy = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {"model": "m", "prompt": prompt, "max_tokens": tokens, **greedy, **more}


def tokens_of(answer: dict[str, Any]) -> list[list[int]]:
    """Return the token ids of each choice of a completion."""
    return [choice["token_ids"] for choice in answer["choices"]]


def to_rank(rank: int | None) -> dict[str, str]:
    """Return the header by which a router chooses a data-parallel rank."""
    return {} if rank is None else {"X-data-parallel-rank": str(rank)}


def prefill(server: Server, prompt: object, rank: int | None = None) -> Params:
    """Have P, or a data-parallel rank of it, compute `prompt`; return what D needs to fetch it."""
    asked = body(prompt, 1, kv_transfer_params=REMOTE_DECODE)
    answer = server.post("/v1/completions", asked, headers=to_rank(rank)).raise_for_status().json()
    params: Params = answer["kv_transfer_params"]
    if params.get("do_remote_prefill") is not True:
        raise HarnessError(f"P offers {params}", "what D needs to fetch the prompt")
    return params


def first_token(server: Server, asked: dict[str, Any]) -> tuple[float, int]:
    """Stream a completion; return the seconds until its first token came, and that token."""
    begin = time.monotonic()
    with (
        client(server.url) as http,
        http.stream("POST", "/v1/completions", json={**asked, "stream": True}) as answer,
    ):
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                if "choices" in chunk and (tokens := tokens_of(chunk)[0]):
                    return time.monotonic() - begin, tokens[0]
        raise HarnessError(f"a stream with HTTP {answer.status_code} ended", "a token")


def gone_p(params: Params, name: str) -> Params:
    """Return `params` as of an engine `name` that D has never met, at a port where nobody is."""
    return {**params, "remote_engine_id": f"gone-{name}", "remote_port": free_ports(1)[0]}


def lying_p(params: Params, name: str) -> Params:
    """Return `params` of an engine `name` at an address where another one answers."""
    return {**params, "remote_engine_id": f"another-{name}"}


def leave(port: int, asked: dict[str, Any], delay: float | None) -> None:
    """Ask for a completion and cut the connection without a goodbye.

    That is after `delay` seconds; None says: with the first token of a stream, when D surely has
    the request.
    """
    content = json.dumps(asked if delay is not None else {**asked, "stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: d\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        if delay is not None:
            time.sleep(delay)
        else:
            heard = b""
            while b"data: " not in heard and (more := connection.recv(4096)):
                heard += more
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

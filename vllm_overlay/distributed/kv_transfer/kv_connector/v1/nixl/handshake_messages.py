# SPDX-License-Identifier: Apache-2.0
"""All releases: what the handshake's listener can read, and nothing else, is handed to it.

Its thread ends with the first message that is no handshake, and no peer can shake hands from then
on. It takes no ill will to send one. To ZeroMQ, whose first protocol begins with the length of a
name, the start of a TLS connection or of an HTTP request is a message; and other releases'
handshakes have another number of parts.
"""

from __future__ import annotations

import time
from typing import cast

import msgspec
import zmq
from vllm.logger import init_logger

from vllm_overlay.distributed.kv_transfer.fix_counts import Acted, count
from vllm_overlay.logging_utils.bounded_log import BoundedLog

log = BoundedLog(init_logger(f"vllm.{__name__}"))

LONGEST = 256
"""Bytes of a handshake; it has some twenty. What is longer may be nested too deep for the log."""

PAUSE = 1.0
"""Seconds after which vLLM's listener looks whether it has to end, if no handshake comes: its own
timeout."""

_GET_META = b"get_meta_msg"
"""What begins a handshake, in every release."""

_SHOWN = 80
"""Bytes of a message that the log shows."""


def receive_handshake(socket: zmq.Socket[bytes], parts: int) -> tuple[bytes, bytes, bytes]:
    """Receive until there is a handshake, which has so many parts in this release.

    Which rank it asks for, and for what, is the listener's to say.

    Returns:
        Who sent it, an empty frame or whatever stands there, and the handshake.

    Raises:
        zmq.Again: Nothing has come in the socket's time, or no handshake in `PAUSE`. The listener
            looks then whether it has to end.
    """
    until = time.monotonic() + PAUSE
    while True:
        frames = socket.recv_multipart()
        problem = _problem(frames, parts)
        if not problem:
            return cast("tuple[bytes, bytes, bytes]", tuple(frames))
        count(Acted.NO_HANDSHAKE)
        log.warning(
            "The side channel got %s, which it does not answer, and goes on listening: %r",
            problem,
            b" ".join(frames)[:_SHOWN],
        )
        if time.monotonic() > until:
            raise zmq.Again


def _problem(frames: list[bytes], parts: int) -> str:
    """Say what a message is that this release's listener cannot read; empty if it can."""
    said = _list(frames[2]) if len(frames) == 3 else []
    if len(said) == parts:
        return ""
    if said and said[0] == _GET_META:
        return f"the handshake of another vLLM release, of {len(said)} parts instead of {parts}"
    return "what is no handshake (a probe, a scrape or a scan of its port, which peers alone need)"


def _list(message: bytes) -> list[object]:
    """Return the list that a message is; an empty one if it is none."""
    if len(message) > LONGEST:
        return []
    try:
        said = msgspec.msgpack.decode(message)
    except Exception:  # also of Unicode: nothing that is sent may end the thread
        return []
    return said if isinstance(said, list) else []

# SPDX-License-Identifier: Apache-2.0
"""All releases: does an answer say that only another request can succeed?

Then nobody needs the blocks any more. Everything else is no proof of that. After 429, 503 or any
other error of the server, and after a connection that was lost before the engine had the request, a
retry with the same `kv_transfer_params` is the rule, and it may go to any decode server. Another
one may be about to read the blocks already, and this one cannot know. vLLM as released gets that
right, because the prefill server still holds them; and no delay after which they were released here
would be safe, unless it were as long as the prefill server's own lease, or that server confirmed
the read. Therefore nothing is released: the lease is the delay.

An answer that served (2xx) is never a refusal, whoever computed it. A stream that was turned down
before its first token has answered 200 by then; its first event is the error, with a code.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import Message

_RETRIED = frozenset({408, 425, 429})
"""Statuses from 400 on that ask for the same request again (RFC 9110, 8470 and 6585)."""


def is_final(status: int) -> bool:
    """Whether an HTTP status says that the same request would be refused again."""
    return 400 <= status < 500 and status not in _RETRIED


class Verdict:
    """What an answer says about its request, from what is sent (ASGI messages).

    Attributes:
        begun: something was sent.
        status: what the client was told, None until that is clear. For a stream that begins
            with an error it is that error's code.
    """

    __slots__ = ("_lost", "begun", "status")

    def __init__(self) -> None:
        self.begun = False
        self.status: int | None = None
        self._lost = False

    @property
    def is_final(self) -> bool:
        """Whether the client was told that the same request would be refused again."""
        return self.status is not None and is_final(self.status)

    @property
    def is_fault(self) -> bool:
        """Whether the client was told of a fault of the server."""
        return self.status is not None and self.status >= 500

    def lose_client(self) -> None:
        """Note that the client has gone; what is sent from now on, nobody hears."""
        self._lost = True

    def note(self, message: Message) -> None:
        """Note a message that is about to be sent."""
        self.begun = True
        if self._lost or self.status is not None:
            return
        if message["type"] == "http.response.start":
            if message["status"] != 200:
                self.status = message["status"]
        elif message["type"] == "http.response.body":
            self.status = _status_of(message.get("body", b""))


def _status_of(content: bytes) -> int | None:
    """The status in what a 200 begins with; None if that says nothing, as a comment does."""
    while content:
        line, _, content = content.partition(b"\n")
        field, colon, value = line.strip().partition(b":")
        if not field or (colon and field in (b"event", b"id", b"retry")):
            continue
        return _error_code(value) if field == b"data" else 200
    return None


def _error_code(event: bytes) -> int:
    """The code of an event that is an error; 200 for any other, and for one without a code."""
    try:
        error = json.loads(event)["error"]
        code = error["code"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return 200
    return code if type(code) is int else 200

# SPDX-License-Identifier: Apache-2.0
"""All releases: a request's body, kept as long as blocks may wait for it on a prefill server.

Most bodies name no transfer, and some are large (images, token ids). So a body is looked at as it
comes, without a copy, by the thread that serves all others.
"""

from __future__ import annotations

import json
import re
from typing import Any

_KEY = b"do_remote_prefill"
"""Without this key, true, nothing waits on a prefill server."""

_ESCAPED = re.compile(rb"\\u00(?:[67][0-9A-Fa-f]|5[Ff])")
"""A letter or an underscore as JSON can spell it. Encoders never do, clients may."""


class KeptBody:
    """The body of one request."""

    def __init__(self) -> None:
        self._chunks: list[bytes] = []
        self._end = b""  # of what has come: a key may lie in two chunks
        self._may_name = False
        self._parsed: dict[str, Any] | None = None

    def add(self, chunk: bytes, *, more: bool) -> None:
        """Take a further part; `more` are to come."""
        self._chunks.append(chunk)
        if not self._may_name:
            self._may_name = _may_name(self._end + chunk[: len(_KEY)]) or _may_name(chunk)
            self._end = (self._end + chunk[-len(_KEY) :])[-len(_KEY) :]
        if not more and not self._may_name:
            self.clear()

    def clear(self) -> None:
        """Let it go: from now on it is an empty object."""
        self._chunks.clear()
        self._parsed = {}

    @property
    def parsed(self) -> dict[str, Any]:
        """The body as an object; empty if it is anything else. Rejected bodies may be."""
        if self._parsed is None:
            try:
                parsed = json.loads(b"".join(self._chunks))
            except (ValueError, RecursionError):
                parsed = None
            self.clear()
            self._parsed = parsed if isinstance(parsed, dict) else {}
        return self._parsed


def _may_name(part: bytes) -> bool:
    """Whether a part of a body may hold the key. In UTF-16 and UTF-32 it has zeros in it."""
    return _KEY in part or b"\0" in part or (b"\\" in part and bool(_ESCAPED.search(part)))

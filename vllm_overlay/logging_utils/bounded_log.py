# SPDX-License-Identifier: Apache-2.0
"""All releases: what a client or a peer can cause at will is logged a few times a minute.

Its lines name requests, so they are worth having; a loop of bad requests must not fill the log.
"""

from __future__ import annotations

import logging
import threading
import time

LINES = 10
"""Lines of one kind that are logged in each period."""

PERIOD = 60.0
"""Seconds."""


class Bound:
    """How often a thing may be said: `LINES` times in each period. From any thread."""

    def __init__(self, lines: int = LINES) -> None:
        self._lines = lines
        self._lock = threading.Lock()
        self._since = float("-inf")
        self._said = self._left_out = 0

    def admit(self) -> int | None:
        """Return None if it may not be said now, else how often it was left out before."""
        with self._lock:
            now = time.monotonic()
            if now - self._since >= PERIOD:
                self._since, self._said = now, 0
            if self._said == self._lines:
                self._left_out += 1
                return None
            self._said += 1
            before, self._left_out = self._left_out, 0
            return before


class BoundedLog:
    """Warnings of one kind: `lines` in each period, and how many were left out before the next.

    From any thread. What is left out last is told only when there is a next one.
    """

    def __init__(self, logger: logging.Logger, lines: int = LINES) -> None:
        self._logger = logger
        self._bound = Bound(lines)

    def warning(self, message: str, *args: object, exc_info: bool = False) -> None:
        """Log a warning as `logging.Logger.warning` does, or count it."""
        before = self._bound.admit()
        if before is None:
            return
        if before:
            message += f" ({before} more like it since the last of them that was logged.)"
        self._logger.warning(message, *args, exc_info=exc_info, stacklevel=2)

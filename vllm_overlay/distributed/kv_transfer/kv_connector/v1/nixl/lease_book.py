# SPDX-License-Identifier: Apache-2.0
"""All releases: P's answer to the question whether a request's blocks still hold its KV.

P keeps a finished request's blocks until D has read them, or until their lease ends; then another
request gets them. D cannot see which: its read of a block that P has given away succeeds. So P's
scheduler, which alone gives blocks away, notes what it holds for whom, and says so when asked.

One reader has a request's blocks, the first that asks. P frees them when its workers hear that
they were read, and that does not say by whom: a second reader could not be told that the blocks are
still there, nor afterwards that it was in time.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

MAX_READ = 2**16
"""Leases of which it is remembered that they were read; about 250 bytes each. One is asked for once
more, if at all, as soon as its reader has read it."""


class Standing(str, Enum):
    """How a request's blocks stand, for the reader that asks."""

    HELD = "held"
    READ = "read"
    """They were held until the workers heard that they were read."""
    GONE = "gone"
    """They were given away, or are somebody else's, or nobody knows of them."""


class Answer(NamedTuple):
    """What P says of a request's blocks.

    Attributes:
        standing: How they stand.
        seconds: How much longer they are held at least, counted from when this was said.
    """

    standing: Standing
    seconds: float


@dataclass
class _Lease:
    token: str
    until: float
    reader: str | None = None
    expired: bool = False


class LeaseBook:
    """The leases of one engine. The scheduler writes; the handshake listener's thread asks.

    A lease is known to readers by a token that nobody else's has: not the next of a request of the
    same id, nor one of this engine after it has started again.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._held: dict[str, _Lease] = {}  # by request
        self._by_token: dict[str, _Lease] = {}
        self._read: dict[str, str] = {}  # readers by token

    def hold(self, req_id: str, until: float) -> str:
        """Note that the blocks of a request are held until it is read, or at least until then.

        Returns:
            The token of the lease.
        """
        lease = _Lease(uuid.uuid4().hex, until)
        self.free([req_id])
        with self._lock:
            self._held[req_id] = self._by_token[lease.token] = lease
        return lease.token

    def expire(self, req_ids: Iterable[str]) -> None:
        """Note whose lease has ended at one of the workers, or more."""
        with self._lock:
            for req_id in req_ids:
                if req_id in self._held:
                    self._held[req_id].expired = True

    def free(self, req_ids: Iterable[str]) -> None:
        """Note whose blocks are about to be given away."""
        with self._lock:
            for req_id in req_ids:
                lease = self._held.pop(req_id, None)
                if lease is None:
                    continue
                del self._by_token[lease.token]
                if lease.reader is None or lease.expired:
                    continue
                self._read[lease.token] = lease.reader
                if len(self._read) > MAX_READ:
                    del self._read[next(iter(self._read))]

    def answer(self, token: str, reader: str) -> Answer:
        """Say how the blocks of a lease stand for `reader`, who reads them if nobody else does.

        Args:
            token: What `hold` returned.
            reader: What sets a reader apart from all others, and is the same when it asks again.
        """
        with self._lock:
            lease = self._by_token.get(token)
            if lease is None:
                read = self._read.get(token) == reader
                return Answer(Standing.READ if read else Standing.GONE, 0.0)
            if lease.expired or lease.reader not in (None, reader):
                return Answer(Standing.GONE, 0.0)
            lease.reader = reader
            return Answer(Standing.HELD, max(0.0, lease.until - self._clock()))

# SPDX-License-Identifier: Apache-2.0
"""All releases: P's answer to the question whether a request's blocks still hold its KV.

P keeps a finished request's blocks until D has read them, or until their lease ends; then another
request gets them. D cannot see which: its read of a block that P has given away succeeds. So P's
scheduler, which alone gives blocks away, notes what it holds and who has read it, and says so when
asked.

The first that asks is promised that the blocks stay for a while, and P keeps to that even if its
workers hear meanwhile that somebody else has read them. To all who ask later P says how it is.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

PROMISE = 10.0
"""Seconds for which blocks are promised at most. For so long they stay when another engine has read
them, which takes a router that sends a prefilled request to two."""

MAX_READ = 2**16
"""Leases of which it is remembered who has read them; about 400 bytes each. Each is asked for once
more, if at all, as soon as its reader has read it."""


class Standing(str, Enum):
    """How a request's blocks stand, for the reader that asks."""

    HELD = "held"
    READ = "read"
    """They were held until the workers had heard from all ranks of this reader, and no others. Or
    the workers do not say whom they have heard about these blocks, and do about others."""
    GONE = "gone"


class Answer(NamedTuple):
    """What P says of a request's blocks.

    Attributes:
        standing: How they stand.
        seconds: For how long they are promised, counted from when this was said.
    """

    standing: Standing
    seconds: float


_GONE = Answer(Standing.GONE, 0.0)


@dataclass
class _Lease:
    """A request's blocks.

    Attributes:
        until: When a worker may give them up, at the earliest.
        reader: To whom they are promised, `agents` are its workers, and `promised` is until when.
        heard: From whom the workers have heard that they are read.
        expired: A worker has given them up.
        ended: All workers have done with them; they are held for the promise only.
    """

    token: str
    until: float
    reader: str | None = None
    agents: Set[str] = frozenset()
    promised: float = float("-inf")
    heard: set[str] = field(default_factory=set)
    expired: bool = False
    ended: bool = False

    def is_read_by(self, agents: Set[str]) -> bool:
        return _all_are_of(self.heard, agents)


class LeaseBook:
    """The leases of one engine. The scheduler writes; the handshake listener's thread asks.

    A lease is known to readers by a token that nobody else's has: not the next of a request of the
    same id, nor one of this engine after it has started again.
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        """Begin with no lease; `clock` is that of the deadlines, `time.perf_counter` in vLLM."""
        self._clock = clock or time.perf_counter
        self._lock = threading.Lock()
        self._held: dict[str, _Lease] = {}  # by request
        self._by_token: dict[str, _Lease] = {}
        self._ended: dict[str, _Lease] = {}  # by request, of those held
        self._read: dict[str, Set[str]] = {}  # by token, who has read what is given away
        self._hears = False  # of who has read; not where K20 is chosen without what notes it

    def hold(self, req_id: str, until: float) -> str:
        """Note that the blocks of a request are held until it is read, or at least until then.

        Returns:
            The token of the lease.
        """
        lease = _Lease(uuid.uuid4().hex, until)
        with self._lock:
            self._give_away(req_id, replaced=True)
            self._held[req_id] = self._by_token[lease.token] = lease
        return lease.token

    def hear(self, told: Mapping[str, Iterable[str]]) -> None:
        """Note which agents have told the workers that they have read which requests' blocks."""
        with self._lock:
            self._hears |= bool(told)
            for req_id, agents in told.items():
                if req_id in self._held:
                    self._held[req_id].heard.update(agents)

    def expire(self, req_ids: Iterable[str]) -> None:
        """Note whose lease has ended at one of the workers, or more."""
        with self._lock:
            for req_id in req_ids:
                if req_id in self._held:
                    self._held[req_id].expired = True

    def free(self, req_ids: Iterable[str]) -> set[str]:
        """Return those of the requests, with which the workers are done, whose blocks may be given
        away now; the others are `due` later.
        """
        with self._lock:
            return {req_id for req_id in req_ids if self._may_go(req_id)}

    def due(self) -> set[str]:
        """Return the requests whose blocks were held for a promise, and need not be any more."""
        if not self._ended:
            return set()
        with self._lock:
            return {req_id for req_id, lease in self._ended.items() if not self._binds(lease)}

    def _may_go(self, req_id: str) -> bool:
        lease = self._held.get(req_id)
        if lease is None:
            return True
        if self._binds(lease):
            lease.ended = True
            self._ended[req_id] = lease
            return False
        self._give_away(req_id)
        return True

    def _binds(self, lease: _Lease) -> bool:
        """Whether blocks are promised to somebody who may still read them.

        Workers that have done with them and have heard from nobody do not say whom they hear.
        """
        kept = lease.heard and not lease.expired and not lease.is_read_by(lease.agents)
        return bool(kept) and lease.promised > self._clock()

    def _give_away(self, req_id: str, *, replaced: bool = False) -> None:
        """Forget a lease, if there is one; what is `replaced` unheard nobody has read."""
        lease = self._held.pop(req_id, None)
        if lease is None:
            return
        self._ended.pop(req_id, None)
        del self._by_token[lease.token]
        if not lease.expired and (lease.heard or not replaced):
            self._read[lease.token] = lease.heard
            if len(self._read) > MAX_READ:
                del self._read[next(iter(self._read))]

    def answer(self, token: str, reader: str, agents: Set[str]) -> Answer:
        """Say how the blocks of a lease stand for a reader.

        Args:
            token: What `hold` returned.
            reader: What sets a reader apart from all others, and is the same when it asks again.
            agents: Those of its NIXL agents that are known to it.
        """
        with self._lock:
            lease = self._by_token.get(token)
            if lease is None:
                heard = self._read.get(token)
                # By nobody, if a plugin's worker leaves that out of some of its reports.
                lost = heard == set() and self._hears
                read = lost or _all_are_of(heard or (), agents)
                return Answer(Standing.READ, 0.0) if read else _GONE
            now = self._clock()
            if lease.expired:  # not at all of the workers, or the lease would not be here
                return Answer(Standing.HELD, 0.0)
            if lease.ended and lease.reader != reader:
                return Answer(Standing.READ, 0.0) if lease.is_read_by(agents) else _GONE
            if lease.reader in (None, reader):
                lease.reader, lease.agents = reader, agents
                if not lease.ended:
                    lease.promised = max(lease.promised, min(lease.until, now + PROMISE))
            left = lease.promised - now if lease.reader == reader else 0.0
            return Answer(Standing.HELD, max(0.0, left))


def _all_are_of(heard: Iterable[str], agents: Set[str]) -> bool:
    """Whether there is somebody that was heard, and nobody else than these."""
    return bool(heard) and agents >= set(heard)

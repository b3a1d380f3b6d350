# SPDX-License-Identifier: Apache-2.0
"""All releases: whether what D has read is what P computed, from what P says.

D asks when it begins to read. P's answer says for how long the blocks are held at least, and a read
that ended within that time is good: nothing more is said, and nobody waits. One that ended later is
asked for again, and is good if P still holds the blocks, or held them until it heard that this
reader has read them. Everything else is no read at all.
"""

from __future__ import annotations

from enum import Enum

from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.lease_book import Answer, Standing

MARGIN = 1.0
"""Seconds by which a read has to end before its lease. The clocks of two machines run apart by less
than 500 parts in a million (what NTP allows), that is 0.24 s in the longest lease (480 s)."""

AGAIN = 1.0
"""Seconds after which a question is asked again: it went to a P that is no more, or was lost with a
connection."""

PATIENCE = 5.0
"""Seconds in which questions have to find an answer."""


class Verdict(Enum):
    """What to do with a read."""

    USE = "use what was read"
    REFUSE = "treat it as a failed read"
    WAIT = "wait for an answer, or for the end of the read"
    ASK = "ask again"


class ReadCheck:
    """What is known of one read. All times are seconds on one clock of D's.

    Answers may come late, twice and in any order. Of two events of the same time nobody knows which
    was first.

    Attributes:
        is_answered: Whether there was an answer, of any kind.
    """

    def __init__(self, asked: float) -> None:
        """Begin with the first question, which is asked now."""
        self._asked: float | None = asked  # the last question, which is not answered
        self._silent_since = asked
        self._good_until = float("-inf")
        self._gone = float("inf")  # when that was asked to which P has said so first
        self._confirmed = False
        self._ended: float | None = None
        self.is_answered = False

    def ends(self, now: float) -> None:
        """Hear that the read is over; the first time counts."""
        if self._ended is None:
            self._ended = now

    def asks(self, now: float) -> None:
        """Note that a question is on its way."""
        if self._asked is None:
            self._silent_since = now
        self._asked = now

    def resumes(self, now: float) -> None:
        """Hear that D has not looked for long, until now: P is not silent because of that."""
        self._silent_since = max(self._silent_since, now)

    def hears(self, asked: float, answer: Answer) -> None:
        """Take the answer to the question that was asked at `asked`."""
        self.is_answered = True
        if asked == self._asked:
            self._asked = None
        if answer.standing is Standing.GONE:
            self._gone = min(self._gone, asked)  # and P never says anything else again
            return
        self._good_until = max(self._good_until, asked + answer.seconds - MARGIN)
        # Held when it was asked for, after the read: held all the time.
        if answer.standing is Standing.READ or (self._ended is not None and asked > self._ended):
            self._confirmed = True

    def was_gone(self, when: float) -> bool:
        """Whether P has said that the blocks are gone, to what was asked until `when`."""
        return self._gone <= when

    def verdict(self, now: float) -> Verdict:
        """Say what to do with the read."""
        if self._ended is None:
            return Verdict.WAIT
        gone = self._gone < float("inf")
        if self._confirmed or (not gone and self._ended <= self._good_until):
            return Verdict.USE
        if gone:
            return Verdict.REFUSE
        unanswered = self._asked is not None
        if unanswered and now - max(self._silent_since, self._ended) >= PATIENCE:
            return Verdict.REFUSE
        due = self._asked is None or now - self._asked >= AGAIN
        return Verdict.ASK if due and now > self._ended else Verdict.WAIT

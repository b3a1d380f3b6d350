"""Which slot of its blocks a request's recurrent state is in: what the model runner keeps in mind.

A slot is an index into a request's list of blocks of states. Of a step with guesses there is a
state after each token, in slots one behind the other, and which of them is the request's is known
once the guesses are judged. The three ways are those of `mamba_cache_mode`, as the runner's
`mamba_utils.py` and the attention backends of Mamba have them from 0.18.0 on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Mode = Literal["none", "align", "all"]


@dataclass(frozen=True)
class Span:
    """What a step computes of a request: `guesses` are the last of the tokens up to `end`."""

    start: int
    end: int
    guesses: int


class Slots:
    """See the module.

    Args:
        mode: "none", one state for the whole sequence, and slots for guesses behind it; "align",
            the same, beginning at the block of the last token; "all", one for the end of each block
            of tokens. With "all" nobody guesses here.
        tokens: in a block of states.
    """

    def __init__(self, mode: Mode, tokens: int) -> None:
        self._mode, self._tokens = mode, tokens
        self._at: dict[str, tuple[int, int]] = {}  # first slot of the last step, tokens accepted

    def begin(self, req_id: str, span: Span, *, fresh: bool) -> list[tuple[int, int]]:
        """Take up a request; `fresh` if it was not in the last step, or was preempted since.

        Returns:
            states to be copied before the model runs, from which slot to which.
        """
        if fresh:
            self._at.pop(req_id, None)
        if self._mode != "align":
            self._at.setdefault(req_id, (0, 1))
            return []
        first, accepted = self._at.get(req_id, ((span.start - 1) // self._tokens, 1))
        now = (span.end - 1) // self._tokens
        if first in (now, -1):
            self._at[req_id] = now, accepted
            return []
        self._at[req_id] = now, 1
        return [(first + accepted - 1, now)]

    def read(self, req_id: str, span: Span) -> int:
        """The slot of the state with which a step goes on."""
        if self._mode == "all":
            return (span.start - 1) // self._tokens
        first, accepted = self._at[req_id]
        return first + accepted - 1

    def written(self, req_id: str, span: Span) -> list[tuple[int, int]]:
        """The slots that a step writes, each with the position of the token after which it is."""
        if self._mode == "all":
            blocks = range(span.start // self._tokens, (span.end - 1) // self._tokens + 1)
            return [(block, min((block + 1) * self._tokens, span.end) - 1) for block in blocks]
        first, _ = self._at[req_id]
        if not span.guesses:
            return [(first, span.end - 1)]
        return [(first + i, span.start + i) for i in range(span.end - span.start)]

    def judge(self, req_id: str, span: Span, right: int) -> list[tuple[int, int]]:
        """Take note of how many guesses were right.

        Returns:
            as `begin`, after the model has run: the state at the end of a block that is now full.
        """
        first, _ = self._at[req_id]
        self._at[req_id] = first, right + 1
        known = span.end - span.guesses
        full = (known + right) // self._tokens * self._tokens
        if self._mode != "align" or full < known:
            return []
        source, target = first + full - known, full // self._tokens - 1
        if first == target:
            self._at[req_id] = first, 1
        return [(source, target)]

    def forget(self, req_id: str) -> None:
        """It has ended."""
        self._at.pop(req_id, None)

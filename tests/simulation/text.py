"""What a model stand-in makes of tokens: KV that says what it is of, and the next token.

The KV of a token depends on the token and on all before it, and on nothing else, as a model's
does. Here it is a number of 64 bits, folded from these tokens, and spread over the cache with the
layer, the head and the place in it. So KV of another request, of another position, layer or head is
another number, and of the same prefix it is the same.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.uint64]

WRONG = 1
"""The token that is sampled from wrong KV; no right one is this."""

_MASK = 2**64 - 1


def _mix(number: int) -> int:
    number &= _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)


def number(*parts: int) -> int:
    """A number of 64 bits, another one for other parts."""
    folded = 0
    for part in parts:
        folded = _mix(folded * 0x9E3779B97F4A7C15 + part + 1)
    return folded


class Text:
    """A prompt, and what a right model makes of it."""

    def __init__(self, prompt: Iterable[int]) -> None:
        self.tokens: list[int] = []
        self._folded: list[int] = []
        for token in prompt:
            self._append(token)

    def _append(self, token: int) -> None:
        before = self._folded[-1] if self._folded else 0
        self.tokens.append(token)
        self._folded.append(_mix(before * 0x9E3779B97F4A7C15 + token + 1))

    def token(self, position: int) -> int:
        """The token at a position, sampled if it is behind the prompt."""
        while len(self.tokens) <= position:
            self._append(2 + (self._folded[-1] >> 33) % 97)
        return self.tokens[position]

    def kv(self, start: int, end: int) -> Numbers:
        """The numbers of the tokens from `start` to before `end`."""
        if end > start:
            self.token(end - 1)
        return np.array(self._folded[start:end], dtype=np.uint64)

    def find(self, wanted: int) -> int | None:
        """The position whose number this is."""
        return self._folded.index(wanted) if wanted in self._folded else None


def prompt(family: int, shared: int, name: int, length: int) -> list[int]:
    """A prompt's tokens: the first `shared` are those of its family, the others its own."""
    return [
        2 + number(1, family, i) % 97 if i < shared else 2 + number(2, name, i) % 97
        for i in range(length)
    ]

"""Make a history smaller that shows something: delta debugging over its events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

_Event = TypeVar("_Event")


def shrink(
    events: Sequence[_Event], shows: Callable[[list[_Event]], bool], tries: int = 400
) -> list[_Event]:
    """Return a part of `events` that still shows it, of which no single event can be left out.

    Args:
        events: a history that shows it.
        shows: whether a history does.
        tries: how often to ask; then what has been reached by then is returned.
    """
    kept = list(events)
    size = max(1, len(kept) // 2)
    while tries > 0 and kept:
        start, smaller = 0, False
        while start < len(kept) and tries > 0:
            rest = kept[:start] + kept[start + size :]
            tries -= 1
            if shows(rest):
                kept, smaller = rest, True
            else:
                start += size
        if size == 1 and not smaller:
            break
        if not smaller or size > len(kept):
            size = max(1, size // 2)
    return kept

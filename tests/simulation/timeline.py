"""A history for people: time goes down, each engine has a column."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import Protocol

WIDTH = 44


class Line(Protocol):
    """What happened where and when."""

    @property
    def time(self) -> float: ...
    @property
    def who(self) -> str: ...
    @property
    def words(self) -> str: ...


def timeline(lines: Iterable[Line], columns: Sequence[str], width: int = WIDTH) -> str:
    """Write lines under each other, each in the column of its engine.

    Args:
        lines: what happened, in order.
        columns: the engines, from left to right; what happened elsewhere gets no line.
        width: characters of a column.
    """
    rows = [f"{'s':>8}  " + "".join(f"{name:<{width}}" for name in columns).rstrip()]
    before = ""
    for line in lines:
        if line.who not in columns:
            continue
        indent = columns.index(line.who) * width
        time = f"{line.time:.2f}"
        for i, part in enumerate(textwrap.wrap(line.words, width - 2) or [""]):
            stamp = time if i == 0 and time != before else ""
            rows.append(f"{stamp:>8}  {' ' * indent}{'  ' * bool(i)}{part}".rstrip())
        before = time
    return "\n".join(rows)

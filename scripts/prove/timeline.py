"""A history of the simulation as a picture: a column for each engine, time goes down.

Boxes are what happened, arrows what went from one to another: requests and answers at once, reads
(from P, whose blocks they are) and notifications in their time. The text is tests/simulation's own.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

_COLUMN, _STAMP, _LINE, _GAP, _HEAD = 280, 56, 14, 8, 34  # pixels
_LETTERS = 42  # in a line of a box
_INK, _READ, _WORD, _FOUND = "#333333", "#1a6b3c", "#6a4fa3", "#b3261e"

_TOP = """\
<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" \
viewBox="0 0 {width} {height}" font-family="monospace" font-size="11">
<title>{title}</title>
<rect width="100%" height="100%" fill="white"/>
<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" \
orient="auto"><path d="M0 0L8 4L0 8z" fill="context-stroke"/></marker></defs>
"""


@dataclass
class _Box:
    """A line, laid out."""

    line: Mapping[str, Any]
    column: int
    text: list[str]
    top: int

    @property
    def height(self) -> int:
        return len(self.text) * _LINE + 4

    @property
    def middle(self) -> float:
        return self.top + self.height / 2


def as_svg(title: str, columns: Sequence[str], lines: Sequence[Mapping[str, Any]]) -> str:
    """Draw a history.

    Args:
        title: What it shows.
        columns: Who has a column, from left to right.
        lines: What happened, in order; `Line` of tests/simulation/world.py. Of what is reached in,
            or comes from, somewhere else nothing is drawn, and of arrows none that has one end.
    """
    boxes, top = [], _HEAD + 20
    for line in lines:
        if line["who"] in columns:
            text = textwrap.wrap(line["words"], _LETTERS) or [""]
            boxes.append(_Box(line, columns.index(line["who"]), text, top))
            top += boxes[-1].height + _GAP
    parts = [_TOP.format(width=_left(len(columns)), height=top + _GAP, title=escape(title))]
    parts += [_text(8, 14, title, "font-weight='bold'")]
    for number, name in enumerate(columns):
        x = _middle(number)
        parts.append(f'<line x1="{x}" y1="{_HEAD + 8}" x2="{x}" y2="{top}" stroke="#cccccc"/>')
        parts.append(_text(x, _HEAD, name, "font-weight='bold' text-anchor='middle'"))
    parts += _boxes(boxes)
    parts += _arrows(boxes, columns)
    return "\n".join([*parts, "</svg>", ""])


def _boxes(boxes: Sequence[_Box]) -> Iterator[str]:
    before = None
    for box in boxes:
        x, line = _left(box.column) + 10, box.line
        found = line["words"].startswith("!!")
        fill, edge = ("#fbe9e7", _FOUND) if found else ("#f6f6f6", "#999999")
        yield (
            f'<rect x="{x}" y="{box.top}" width="{_COLUMN - 20}" height="{box.height}" rx="3" '
            f'fill="{fill}" stroke="{edge}"/>'
        )
        for number, text in enumerate(box.text):
            yield _text(x + 5, box.top + (number + 1) * _LINE - 2, text)
        if line["time"] != before:
            yield _text(4, box.top + _LINE - 2, f"{line['time']:.2f}", "fill='#777777'")
        before = line["time"]


def _arrows(boxes: Sequence[_Box], columns: Sequence[str]) -> Iterator[str]:
    begun: dict[str, tuple[int, float]] = {}
    for box in boxes:
        line = box.line
        if line["to"] in columns:
            yield _arrow(box.column, box.middle, columns.index(line["to"]), box.middle, _INK)
        if line["begins"] and (line["origin"] or line["who"]) in columns:
            origin = columns.index(line["origin"] or line["who"])
            begun[line["begins"]] = origin, box.middle
        if line["ends"] in begun:
            column, y = begun.pop(line["ends"])
            failed = "fails" in line["words"]
            colour = _FOUND if failed else _READ if line["ends"].startswith("read") else _WORD
            yield _arrow(column, y, box.column, box.middle, colour, dashed=failed)


def _arrow(  # noqa: PLR0913, RUF100 - two points
    start: int, y1: float, end: int, y2: float, colour: str, *, dashed: bool = False
) -> str:
    """Draw from the near edge of one column's boxes to that of another's."""
    half = (_COLUMN - 20) // 2
    x1, x2 = _middle(start), _middle(end)
    x1, x2 = (x1 + half, x2 - half) if x1 < x2 else (x1 - half, x2 + half)
    dashes = ' stroke-dasharray="5 4"' if dashed else ""
    return (
        f'<line class="arrow" x1="{x1}" y1="{y1:g}" x2="{x2}" y2="{y2:g}" stroke="{colour}" '
        f'stroke-width="1.3"{dashes} marker-end="url(#tip)"/>'
    )


def _text(x: int, y: int, words: str, more: str = "") -> str:
    return f'<text x="{x}" y="{y}" xml:space="preserve" {more}>{escape(words)}</text>'


def _left(column: int) -> int:
    return _STAMP + column * _COLUMN


def _middle(column: int) -> int:
    return _left(column) + _COLUMN // 2

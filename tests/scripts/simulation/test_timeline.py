"""Each engine has a column."""

from __future__ import annotations

from typing import NamedTuple

from tests.simulation.timeline import timeline


class Line(NamedTuple):
    time: float
    who: str
    words: str


def test_columns() -> None:
    lines = [
        Line(0.0, "P0", "schedules r1"),
        Line(0.0, "D0", "reads what is long"),
        Line(1.5, "elsewhere", "nothing"),
        Line(2.0, "P0", "hears"),
    ]
    assert timeline(lines, ["P0", "D0"], width=14).splitlines() == [
        "       s  P0            D0",
        "    0.00  schedules r1",
        "                        reads what",
        "                          is long",
        "    2.00  hears",
    ]

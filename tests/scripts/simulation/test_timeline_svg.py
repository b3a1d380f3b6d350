"""The picture of a history: who stands where, and what went from whom to whom."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest

from scripts.prove.timeline import as_svg

COLUMNS = ["router", "P0", "D0"]
SVG = "{http://www.w3.org/2000/svg}"


def line(time: float, who: str, words: str, **more: str) -> dict[str, Any]:
    return {"time": time, "who": who, "words": words, "to": "", "begins": "", "ends": "", "origin": ""} | more  # noqa: E501  # fmt: skip


def drawn(*lines: dict[str, Any]) -> ElementTree.Element:
    return ElementTree.fromstring(as_svg("it died: <D>", COLUMNS, lines))  # noqa: S314 - our own


def texts(picture: ElementTree.Element) -> list[str]:
    return [each.text or "" for each in picture.iter(f"{SVG}text")]


def arrows(picture: ElementTree.Element) -> list[dict[str, str]]:
    return [dict(each.items()) for each in picture.iter(f"{SVG}line") if each.get("class")]


def column_of(x: str) -> str:
    picture = drawn()
    heads = {each.text: float(each.get("x") or 0) for each in picture.iter(f"{SVG}text")}
    return min(COLUMNS, key=lambda name: abs(heads[name] - float(x)))


def test_each_has_a_column_and_time_goes_down() -> None:
    picture = drawn(line(0.0, "P0", "first"), line(1.5, "D0", "second"), line(1.5, "D0", "third"))
    assert texts(picture)[:4] == ["it died: <D>", *COLUMNS]
    assert texts(picture)[4:] == ["first", "0.00", "second", "1.50", "third"]
    boxes = [each for each in picture.iter(f"{SVG}rect") if each.get("rx")]
    tops = [float(box.get("y") or 0) for box in boxes]
    assert tops == sorted(tops)
    assert len(set(tops)) == 3
    assert boxes[0].get("x") != boxes[1].get("x") == boxes[2].get("x")


def test_long_words_are_wrapped_within_their_box() -> None:
    picture = drawn(line(0.0, "P0", "schedules " + "r1-p[0:16] " * 9))
    (box,) = (each for each in picture.iter(f"{SVG}rect") if each.get("rx"))
    written = [t for t in picture.iter(f"{SVG}text") if "r1-p" in (t.text or "")]
    assert len(written) == 3
    bottom = float(box.get("y") or 0) + float(box.get("height") or 0)
    assert all(float(t.get("y") or 0) < bottom for t in written)


@pytest.mark.parametrize(
    ("lines", "start", "end"),
    [
        pytest.param([line(0.0, "router", "r0 to D0", to="D0")], "router", "D0", id="a request"),
        pytest.param(
            [
                line(0.0, "D0", "reads", begins="read 1", origin="P0"),
                line(0.1, "D0", "read is complete", ends="read 1"),
            ],
            "P0",
            "D0",
            id="a read",
        ),
        pytest.param(
            [
                line(0.0, "D0", "tells P0", begins="word 1"),
                line(0.1, "P0", "gets it", ends="word 1"),
            ],
            "D0",
            "P0",
            id="a notification",
        ),
    ],
)
def test_an_arrow_goes_from_one_to_the_other(
    lines: list[dict[str, Any]], start: str, end: str
) -> None:
    (arrow,) = arrows(drawn(*lines))
    # An arrow ends at the edge of a box, half a column from the middle.
    inward = 130 if float(arrow["x1"]) < float(arrow["x2"]) else -130
    assert column_of(str(float(arrow["x1"]) - inward)) == start
    assert column_of(str(float(arrow["x2"]) + inward)) == end
    assert float(arrow["y1"]) <= float(arrow["y2"])


def test_a_read_that_fails_is_another_arrow() -> None:
    begins = line(0.0, "D0", "reads", begins="read 1", origin="P0")
    complete, fails = (
        arrows(drawn(begins, line(0.1, "D0", words, ends="read 1")))
        for words in ("read is complete", "a read fails")
    )
    assert "stroke-dasharray" not in complete[0]
    assert "stroke-dasharray" in fails[0]


def test_what_has_one_end_is_no_arrow() -> None:
    picture = drawn(
        line(0.0, "D0", "tells P9", begins="word 1"),
        line(0.0, "D0", "reads", begins="read 1", origin="P9"),
        line(0.0, "P0", "gets", ends="word 7"),
        line(0.0, "P9", "is not there"),
        line(0.0, "router", "to P9", to="P9"),
    )
    assert arrows(picture) == []
    assert "is not there" not in texts(picture)

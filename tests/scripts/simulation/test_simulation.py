"""What `nox -s simulate` makes of what the simulation writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.prove import simulation
from scripts.prove.simulation import Side, drawn, read, read_life, why
from scripts.system.errors import CheckFailedError

FOUND = {"label": "an engine died: D", "seed": "reads/0/3", "steps": 70, "shrunk": [["tick", "D0"]]}
END = {"steps": 100, "histories": 2, "seconds": 0.5, "found": {"an engine died: D": 2}}


def written(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_side(tmp_path: Path) -> None:
    side = read("stock", written(tmp_path / "it.jsonl", FOUND, END))
    assert side.findings == {"an engine died: D": FOUND}
    assert (side.steps, side.histories, side.times) == (100, 2, {"an engine died: D": 2})
    assert side.own == []


@pytest.mark.parametrize("rows", [[], [FOUND]])
def test_a_side_without_an_end_shows_nothing(tmp_path: Path, rows: list[object]) -> None:
    with pytest.raises(CheckFailedError, match="no end"):
        read("stock", written(tmp_path / "it.jsonl", *rows))


@pytest.mark.parametrize("reads", [read, read_life])
def test_a_line_that_is_not_whole_is_no_end(
    tmp_path: Path, reads: Callable[[str, Path], object]
) -> None:
    path = tmp_path / "it.jsonl"
    path.write_text('{"label": "an eng')
    with pytest.raises(CheckFailedError, match="another wrote there"):
        reads("stock", path)


def test_its_own_is_what_the_other_side_does_not_show() -> None:
    side = Side("patched", elsewhere={"a": "a", "b": None, "c": "a"})
    assert side.own == ["b", "c"]


def test_what_is_found_is_drawn_and_nothing_older_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulation, "REPORTS", tmp_path / "reports")
    monkeypatch.setattr(simulation, "ROOT", tmp_path)
    (tmp_path / "reports").mkdir()
    old = [
        tmp_path / "reports" / f"simulate-0.20.2-{name}.svg" for name in ("patched-7", "stock-1")
    ]
    for path in old:
        path.touch()
    lines = [{"time": 0.0, "who": "D0", "words": "!! it died", "to": "", "begins": "", "ends": ""}]
    row = {**FOUND, "columns": ["D0"], "lines": [{**lines[0], "origin": ""}]}
    pictures = drawn("0.20.2", Side("patched", findings={"an engine died: D": row}))
    assert pictures == {"an engine died: D": Path("reports/simulate-0.20.2-patched-1.svg")}
    assert "it died" in (tmp_path / "reports" / "simulate-0.20.2-patched-1.svg").read_text()
    assert [path.exists() for path in old] == [False, True]


SIZES = [
    {"requests": 240 * n, "sizes": {"memory blocks of Python": 1000 + n, "D0 worker._told": n}}
    for n in (1, 2)
]
LIFE = {
    "steps": 900,
    "seconds": 2.0,
    "events": {"tick": 800},
    "ends": {"at D: length": 480},
    "found": {},
    "growing": {"D0 worker._told": [1, 2], "D0 scheduler.connector.claims._claims": [1, 2]},
}


def test_a_life(tmp_path: Path) -> None:
    life = read_life("patched", written(tmp_path / "it.jsonl", *SIZES, LIFE))
    assert (life.requests, life.steps, life.memory) == (480, 900, (1001, 1002))
    assert life.growing["D0 worker._told"] == (1, 2)
    assert life.unexplained == ["D0 worker._told"]
    assert "131,072" in (why("D0 scheduler.connector.claims._claims") or "")


@pytest.mark.parametrize("rows", [[], SIZES, [LIFE]])
def test_a_life_without_an_end_shows_nothing(tmp_path: Path, rows: list[object]) -> None:
    with pytest.raises(CheckFailedError, match="no end"):
        read_life("stock", written(tmp_path / "it.jsonl", *rows))

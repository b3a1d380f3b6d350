"""What `nox -s simulate` makes of what the simulation writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.prove.simulation import Side, read
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


def test_its_own_is_what_the_other_side_does_not_show() -> None:
    side = Side("patched", elsewhere={"a": "a", "b": None, "c": "a"})
    assert side.own == ["b", "c"]

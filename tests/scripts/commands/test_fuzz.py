from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from scripts.commands import fuzz
from scripts.system.errors import CheckFailedError

RESULT = {
    "cases": 3,
    "outcomes": {"accepted": 1, "BrokenWheelError": 2},
    "slowest": 0.25,
    "peak_mb": 72.0,
    "broken": [],
}


class Children:
    """What is started in place of the cases, and what it says."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[Sequence[str | Path]] = []
        self.result: dict[str, Any] = dict(RESULT)
        monkeypatch.setattr(fuzz, "_FOLDER", folder / "fuzz")
        monkeypatch.setattr(fuzz, "run", self.run)
        self._monkeypatch = monkeypatch

    def run(self, command: Sequence[str | Path], **_: object) -> None:
        self.started.append(command)
        Path(command[-1]).write_text(json.dumps(self.result))

    def fuzz(self, *words: str) -> None:
        self._monkeypatch.setattr(sys, "argv", ["fuzz", *words])
        fuzz.main()


@pytest.fixture
def children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Children:
    return Children(tmp_path, monkeypatch)


def test_runs_each_kind_as_often_as_it_is_told(children: Children) -> None:
    children.fuzz("--wheels", "7", "--registries", "0", "--seed", "s", "--first", "4")
    said = [[*map(str, command[3:9])] for command in children.started]
    assert said == [
        [kind, count, "--seed", "s", "--first", "4"]
        for kind, count in (("wheels", "7"), ("patches", "5000"), ("kills", "200"))
    ]


@pytest.mark.parametrize("words", [("--wheels", "-1"), ("--kills", "few"), ("--first", "-1")])
def test_refuses_what_is_no_count(
    children: Children, words: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        children.fuzz(*words)
    assert caught.value.code == 2
    assert words[1] in capsys.readouterr().err
    assert children.started == []


def test_prints_how_the_cases_ended(children: Children, capsys: pytest.CaptureFixture[str]) -> None:
    children.fuzz("--seed", "s")
    said = capsys.readouterr()
    assert "seed s" in said.err
    for words in ("wheels", "patches", "registries", "kills", "BrokenWheelError", "72 MB"):
        assert words in said.out


def test_a_broken_rule_names_the_seed_and_the_case(
    children: Children, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = {"case": 5, "rule": "bytes", "detail": "other \x1b[31m bytes", "saved": "a/wheels-5"}
    children.result["broken"] = [broken]
    with pytest.raises(CheckFailedError, match="4 cases break a rule, with seed s") as caught:
        children.fuzz("--seed", "s")
    assert caught.value.next_step.endswith("nox -s fuzz -- --seed s")
    assert "✗ bytes, a/wheels-5: other \\x1b[31m bytes" in capsys.readouterr().err

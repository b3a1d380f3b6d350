"""What `nox -s simulate` refuses before it makes an environment."""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence

import pytest

from scripts.commands import simulate
from scripts.project import ROOT
from scripts.prove.simulation import PROFILES, Side

HISTORIES = ROOT / "tests" / "simulation" / "history.py"


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """What would have been played, instead of playing it."""
    words: list[Sequence[str]] = []

    def note(release: str, sides: Sequence[str], arguments: Sequence[str]) -> list[Side]:
        words.append(arguments)
        return []

    monkeypatch.setattr(simulate, "simulate", note)
    monkeypatch.setattr(simulate, "live", note)
    return words


@pytest.mark.parametrize(
    "words",
    [
        ("--profile", "zzz"),
        ("--steps", "-1"),
        ("--steps", "0"),
        ("--steps", "many"),
        ("--requests", "0"),
        ("--requests", "-5"),
        ("--history", "zzz/0/1"),
    ],
)
def test_what_cannot_be_played_is_refused(
    words: tuple[str, str],
    played: list[Sequence[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["simulate", "0.20.2", *words])
    with pytest.raises(SystemExit) as caught:
        simulate.main()
    assert caught.value.code == 2
    assert f"argument {words[0]}: " in capsys.readouterr().err
    assert played == []


@pytest.mark.parametrize(
    "words",
    [
        ["--steps", "1", "--seed", "7", "--profile", "all", "--history", "all/0/1"],
        ["--requests", "1", "--seed", "7"],
    ],
)
def test_what_can_be_is_handed_on(
    words: list[str], played: list[Sequence[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["simulate", "0.20.2", *words])
    simulate.main()
    assert played == [words]


def test_the_profiles_are_those_of_the_histories() -> None:
    for node in ast.parse(HISTORIES.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "PROFILES":
            assert isinstance(node.value, ast.Dict)
            names = [ast.literal_eval(key) for key in node.value.keys if key is not None]
    assert tuple(names) == PROFILES

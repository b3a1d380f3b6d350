"""The id of a fix may be typed in any case, wherever one is."""

from __future__ import annotations

import sys

import pytest

from scripts.commands import apply, edit, export, regressions
from scripts.patchset.registry import Fix


@pytest.fixture(params=["k05", "K05"])
def typed(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_of_apply_and_export(typed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["apply", "--only", f"{typed},40449"])
    assert apply._arguments().only == ["K05", "40449"]
    monkeypatch.setattr(sys, "argv", ["export", "--fix", typed, "--fix", "40449"])
    assert export._arguments().fix == ["K05", "40449"]


def test_of_edit(typed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, str]] = []
    monkeypatch.setattr(edit, "start", lambda release, fix, alone: started.append((release, fix)))
    monkeypatch.setattr(sys, "argv", ["edit", "0.20.2", typed])
    edit.main()
    assert started == [("0.20.2", "K05")]


class _BegunError(Exception):
    pass


def test_of_regressions(typed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(fix: Fix, release: str, side: str) -> str:
        raise _BegunError(fix.id)

    monkeypatch.setattr(regressions, "inputs", begin)
    monkeypatch.setattr(sys, "argv", ["regressions", "0.20.2", "--fix", typed])
    with pytest.raises(_BegunError, match="K05"):
        regressions.main()

"""`.github/report-verdict`: what it makes of a verdict, with real git and a noting `gh`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from scripts.project import ROOT
from tests.scripts.repos import BARE, commit, git

SCRIPT = ROOT / ".github" / "report-verdict"
GH = """\
#!/bin/sh
printf '%s\\n' "$*" >> "$NOTES"
if [ "$1 $2" = "issue list" ]; then cat "$ISSUES"; fi
"""


class Forge:
    """A repository, a clone of it as CI has one, and the verdict that another job has written."""

    def __init__(self, folder: Path) -> None:
        self.origin, self.clone = folder / "origin", folder / "clone"
        self.verdict, self.notes, self.issues = folder / "v", folder / "notes", folder / "issues"
        commit(self.origin, {"patches/one": "1\n", "noxfile.py": "pass\n"}, "first")
        git(folder, "clone", "--quiet", "--depth=1", self.origin.as_uri(), "clone")
        self.verdict.mkdir()
        (self.verdict / "track.md").write_text("a table\n")
        self.notes.touch()
        self.issues.touch()
        (folder / "bin").mkdir()
        (folder / "bin" / "gh").write_text(GH)
        (folder / "bin" / "gh").chmod(0o755)
        self.path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"

    def carry(self, release: str, files: dict[str, str | bytes | None]) -> None:
        """Put a carried release into the verdict, as the job before does."""
        work = self.verdict.parent / "work"
        git(self.verdict.parent, "clone", "--quiet", str(self.origin), str(work))
        git(work, "switch", "--quiet", "--create", f"carry/{release}")
        commit(work, files, f"vLLM {release}")
        bundle = str(self.verdict / "carry.bundle")
        git(work, "bundle", "create", "--quiet", bundle, "^origin/main", f"carry/{release}")

    def report(self, *rows: tuple[str, str, str]) -> subprocess.CompletedProcess[str]:
        """Run the script on these releases, verdicts and branches."""
        keys = ("release", "verdict", "branch")
        text = json.dumps([dict(zip(keys, row, strict=True)) for row in rows])
        (self.verdict / "track.json").write_text(text)
        return subprocess.run(
            [SCRIPT, self.verdict],
            cwd=self.clone,
            env={
                **os.environ,
                **BARE,
                "PATH": self.path,
                "NOTES": str(self.notes),
                "ISSUES": str(self.issues),
            },
            capture_output=True,
            text=True,
            check=False,
        )

    def branches(self) -> list[str]:
        return git(self.origin, "branch", "--format=%(refname:short)").split()

    def said(self) -> list[str]:
        """Return what `gh` was asked to make."""
        return [line for line in self.notes.read_text().splitlines() if " create " in line]


@pytest.fixture
def forge(tmp_path: Path) -> Forge:
    return Forge(tmp_path)


CARRIED = ("0.34.0", "carried", "carry/0.34.0")


def test_a_carried_release_becomes_a_pull_request_once(forge: Forge) -> None:
    forge.carry("0.34.0", {"patches/two": "2\n", "pyproject.toml": "new\n"})
    done = forge.report(CARRIED)
    assert done.returncode == 0, done.stderr
    assert forge.branches() == ["carry/0.34.0", "main"]
    assert git(forge.origin, "show", "carry/0.34.0:patches/two") == "2\n"
    expected = [
        "pr create --head carry/0.34.0 --title Carry the fixes to vLLM 0.34.0 "
        f"--body-file {forge.verdict / 'track.md'}"
    ]
    assert forge.said() == expected
    assert forge.report(CARRIED).returncode == 0
    assert forge.said() == expected
    assert not (forge.clone / "patches" / "two").exists()  # it was never checked out


@pytest.mark.parametrize("path", ["noxfile.py", ".github/workflows/ci.yml", "scripts/patches/x"])
def test_a_commit_that_changes_more_is_not_pushed(forge: Forge, path: str) -> None:
    forge.carry("0.34.0", {"patches/two": "2\n", path: "evil\n"})
    done = forge.report(CARRIED)
    assert done.returncode == 1
    assert path in done.stdout
    assert forge.branches() == ["main"]
    assert forge.said() == []


@pytest.mark.parametrize(
    "row",
    [
        ("0.34.0", "carried", "main"),
        ("0.34.0", "carried", "--force"),
        ("$(touch x)", "carried", "carry/$(touch x)"),
        ("0.34.0\nx", "needs a person", ""),
    ],
)
def test_names_that_are_none_are_refused(forge: Forge, row: tuple[str, str, str]) -> None:
    forge.carry("0.34.0", {"patches/two": "2\n"})
    assert forge.report(row).returncode == 1
    assert forge.branches() == ["main"]
    assert forge.said() == []
    assert not (forge.clone / "x").exists()


def test_a_release_that_needs_a_person_becomes_an_issue_once(forge: Forge) -> None:
    row = ("0.34.0", "needs a person", "")
    done = forge.report(row)
    assert done.returncode == 0, done.stderr
    expected = [
        f"issue create --title vLLM 0.34.0 needs a person --body-file {forge.verdict / 'track.md'}"
    ]
    assert forge.said() == expected
    forge.issues.write_text("vLLM 0.34.0 needs a person\n")
    assert forge.report(row).returncode == 0
    assert forge.said() == expected


def test_nothing_new_makes_nothing(forge: Forge) -> None:
    assert forge.report().returncode == 0
    assert (forge.branches(), forge.said()) == (["main"], [])

"""`nox -s matrix` and the workflows that it feeds."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from scripts.commands.matrix import PYTHONS
from scripts.project import ROOT, project

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_every_release_is_in_it_and_the_default_one_on_each_python() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "scripts.commands.matrix"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    rows = json.loads(done.stdout)["include"]
    assert {row["release"] for row in rows} == {*project().releases}
    default = [row["python"] for row in rows if row["release"] == project().default_release]
    assert default == [*PYTHONS]
    assert len(rows) == len(project().releases) + len(PYTHONS) - 1
    assert done.stdout.count("\n") == 1  # as GITHUB_OUTPUT wants it


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_pin_actions_by_hash_and_start_without_permissions(path: object) -> None:
    text = ROOT.joinpath(str(path)).read_text()
    uses = re.findall(r"uses: (.+)", text)
    assert uses
    assert all(re.fullmatch(r"[\w/.-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", use) for use in uses)
    assert "\npermissions: {}\n" in text
    assert "pull_request_target" not in text
    sessions = set(re.findall(r"nox -s (\w+)", text))
    known = set(re.findall(r"def (\w+)\(session", (ROOT / "noxfile.py").read_text()))
    assert sessions <= known

"""Who may import whom: each rule of pyproject.toml is broken once, and lint names it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from scripts.project import ROOT
from tests.scripts import checkouts
from tests.scripts.repos import write


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the tools and the overlay, with one regression test."""
    folder = checkouts.tools(tmp_path_factory.mktemp("imports")).folder
    write(folder, {"tests/regressions/test_1.py": "import vllm\n"})
    return folder


def broken(folder: Path) -> list[str]:
    """Return the rules that are not kept."""
    result = subprocess.run(
        ["lint-imports", "--no-cache"],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = result.stdout.splitlines()
    assert any(line.startswith("Contracts: ") for line in lines), result.stdout + result.stderr
    found = [line.partition(" BROKEN")[0] for line in lines if " BROKEN" in line]
    assert bool(found) == bool(result.returncode)
    return found


def test_every_rule_is_kept(tools: Path) -> None:
    assert broken(tools) == []


@pytest.mark.parametrize(
    ("path", "line", "rule"),
    [
        ("scripts/patchset/patch.py", "from scripts.wheel import plan", "no import runs upward"),
        ("scripts/wheel/plan.py", "from scripts.commits import clone", "no import runs upward"),
        ("scripts/prove/stock.py", "from scripts.commands import edit", "no import runs upward"),
        ("scripts/new.py", "import os", "no import runs upward"),  # is in no layer
        ("scripts/commands/lock.py", "import scripts.commands.edit", "a command imports no other"),
        ("scripts/system/errors.py", "import subprocess", "only system starts processes"),
        ("scripts/prove/stock.py", "from git import Repo", "only system.git runs git"),
        ("scripts/prove/stock.py", "import vllm", "the tools import no vLLM"),
        ("vllm_overlay/__init__.py", "import scripts.project", "the overlay imports no tools"),
        (
            "tests/regressions/test_1.py",
            "import vllm_overlay",
            "regression tests import no overlay",
        ),
    ],
)
def test_what_breaks_a_rule_is_named(tools: Path, path: str, line: str, rule: str) -> None:
    file = tools / path
    before = file.read_text() if file.exists() else None
    try:
        file.write_text(f"{before or ''}\n{line}\n")
        assert any(found.startswith(rule) for found in broken(tools))
    finally:
        if before is None:
            file.unlink()
        else:
            file.write_text(before)


def test_commands_and_sessions_have_the_same_names() -> None:
    sessions = {
        line.removeprefix("def ").partition("(")[0]
        for line in (ROOT / "noxfile.py").read_text().splitlines()
        if line.startswith("def ") and "(session: nox.Session)" in line
    }
    commands = {path.stem for path in (ROOT / "scripts" / "commands").glob("*.py")}
    assert sessions == commands - {"__init__"}

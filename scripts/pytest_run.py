"""One run of pytest in an environment with vLLM, and what became of each test."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from scripts.environment import Environment, stage
from scripts.project import ROOT
from scripts.system.process import run

PLUGIN = "tests.vllm_cpu"
_OURS = ("tests/", ".work/stage/tests/")  # a test file, and what it imports: `environment.stage`
WHOLE_RUN = (0, 1)
"""Exit codes of pytest when all that was collected has run."""


@dataclass(frozen=True)
class Outcome:
    """What became of one test.

    Attributes:
        result: "passed", "failed", "skipped", or "error" (in collection, set-up or tear-down).
        place: `file:line` where it ended badly, relative to the repository where it lies there.
        message: First line of what was said there.
    """

    result: str
    place: str = ""
    message: str = ""

    @property
    def is_assertion(self) -> bool:
        """Whether it failed because a test of ours saw other behaviour than it expects."""
        ours = self.place.startswith(_OURS)
        said = self.message.startswith(("AssertionError", "assert ", "Failed: "))
        return self.result == "failed" and ours and said


def run_pytest(
    environment: Environment, paths: list[str], *, shadow: Path | None = None, timeout: float = 1800
) -> dict[str, Outcome]:
    """Run the tests below `paths` and return their outcomes by node id.

    Args:
        environment: Whose Python runs them, with the vLLM that is installed there.
        paths: Files or folders, relative to the repository.
        shadow: A folder whose `vllm` hides the installed one.
        timeout: Seconds for the whole run.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log.jsonl")
        # A file that cannot be collected must not keep the others from running.
        options = ["-q", "--continue-on-collection-errors", "--report-log", str(log)]
        words = [*options, *(str(ROOT / path) for path in paths)]
        result = start_pytest(environment, words, shadow=shadow, timeout=timeout)
        outcomes = outcomes_of(log) if log.is_file() else {}
    if result.returncode not in WHOLE_RUN or not outcomes:
        said = (result.stdout + result.stderr).strip()[-2000:]
        message = f"pytest ended with {result.returncode}: {said}"
        outcomes.update((path, Outcome("error", "", message)) for path in paths)
    return outcomes


def start_pytest(
    environment: Environment,
    words: list[str],
    *,
    shadow: Path | None = None,
    timeout: float | None = None,
    stream: bool = False,
) -> CompletedProcess[str]:
    """Run pytest with the command-line `words` where the installed vLLM is what is imported."""
    return run(
        [
            environment.python, "-m", "pytest", "-p", PLUGIN, "-p", "no:cacheprovider",
            "--config-file", ROOT / "pyproject.toml", "--rootdir", ROOT, *words,
        ],
        cwd=stage(),
        env=environment.variables(shadow),
        timeout=timeout,
        check=False,
        stream=stream,
    )  # fmt: skip


def is_of(node: str, test: str) -> bool:
    """Whether the node id `node` is `test`, or one of its parameters, methods or functions."""
    return node == test or node.startswith((f"{test}::", f"{test}["))


def outcomes_of(log: Path, root: Path = ROOT) -> dict[str, Outcome]:
    """Return the outcome of each test that pytest-reportlog wrote down as ended.

    Args:
        log: The file of pytest-reportlog; it may end early, where the interpreter did.
        root: Places below this folder are given relative to it.
    """
    found: dict[str, Outcome] = {}
    for row in _rows(log):
        if row["$report_type"] not in ("TestReport", "CollectReport"):
            continue
        calls = row.get("when") == "call"
        if row["outcome"] == "passed":
            if calls:
                found.setdefault(row["nodeid"], Outcome("passed"))
        elif row["outcome"] == "skipped":
            why = row.get("longrepr")  # [file, line, reason]; text where a test is expected to fail
            why = why[-1] if isinstance(why, list) and why else why
            found[row["nodeid"]] = Outcome("skipped", "", str(why)[:200])
        else:
            place, message = _crash(row.get("longrepr"), root)
            found[row["nodeid"]] = Outcome("failed" if calls else "error", place, message)
    return found


def _rows(log: Path) -> Iterator[dict[str, Any]]:
    for line in log.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except ValueError:  # the last line of a killed process
            return


def _crash(longrepr: object, root: Path) -> tuple[str, str]:
    if not isinstance(longrepr, dict) or not longrepr.get("reprcrash"):
        return "", str(longrepr)[-500:]
    crash = longrepr["reprcrash"]
    path = Path(crash["path"])
    if path.is_relative_to(root):
        path = path.relative_to(root)
    lines = str(crash["message"]).splitlines()
    return f"{path}:{crash['lineno']}", lines[0] if lines else ""

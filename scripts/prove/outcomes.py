"""What became of each test of a run of pytest, and who says so.

A failure shows a defect only where the test's own file asserts it: `Outcome.is_assertion`. Where
the release itself raised, the test failed, and no more is known. What the tests' own helpers
raise says nothing of the release, so it is an error on every side: `raised` "harness", as the
plugin `tests.support.raised` tells them apart.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.project import ROOT


@dataclass(frozen=True)
class Outcome:
    """What became of one test.

    Attributes:
        result: "passed", "failed", "skipped", or "error" (in collection, set-up or tear-down, or
            where the tests' own harness broke down).
        place: `file:line` where it ended badly, relative to the repository where it lies there.
        message: First line of what was said there.
        raised: Who raised what it ended with: "test", "release", "harness", or "" where that was
            not noted.
    """

    result: str
    place: str = ""
    message: str = ""
    raised: str = ""

    @property
    def is_assertion(self) -> bool:
        """Whether it failed because the test's own file saw other behaviour than it expects."""
        if self.result != "failed" or self.raised:
            return self.result == "failed" and self.raised == "test"
        # A record from before that was noted. A run imports helpers by way of `environment.stage`,
        # so that only a test's own file lies below tests/.
        said = self.message.startswith(("AssertionError", "assert ", "Failed: "))
        return said and self.place.startswith("tests/")


Outcomes = dict[str, Outcome]
"""What became of tests, by pytest node id."""


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
            raised = row.get("raised", "") if calls else "harness"
            result = "error" if raised == "harness" else "failed"
            found[row["nodeid"]] = Outcome(result, place, message, raised)
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

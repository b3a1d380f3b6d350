"""The scenarios of tests/pd on one side, what they have to show, and the report of a run."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.patchset.registry import Registry
from scripts.pd.environment import SIDES, PdEnvironment
from scripts.pd.picture import draw
from scripts.project import REPORTS, ROOT, project
from scripts.prove.environment import stage
from scripts.prove.outcomes import Outcome, is_of, outcomes_of
from scripts.prove.pytest import RAISED, WHOLE_RUN
from scripts.system.errors import CheckFailedError
from scripts.system.process import run

_TEST_S = 1800  # for one test, with the servers that it may have to bring back
_SIDE_S = 3 * 3600


@dataclass
class Scenario:
    """What became of one test.

    Attributes:
        node: Its pytest node.
        shows: The fixes whose absence it shows.
        outcomes: By side; a side that does not have the test is not there.
        figures: What it measured, by side.
    """

    node: str
    shows: tuple[str, ...] = ()
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)


def logs_folder(release: str) -> Path:
    """Where the logs of servers and of pytest go."""
    return REPORTS / "pd" / release


def run_side(environment: PdEnvironment, side: str, expression: str | None) -> Path:
    """Run tests/pd on one side and return pytest's log of it."""
    logs = logs_folder(environment.release) / side
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    log = logs / "pytest.jsonl"
    result = run(
        [
            environment.python, "-m", "pytest", "-p", RAISED,
            "-p", "no:cacheprovider", "-p", "no:asyncio", "-v", "--no-header",
            "--config-file", ROOT / "pyproject.toml", "--rootdir", ROOT,
            "-o", f"timeout={_TEST_S}", "--report-log", log,
            *(["-k", expression] if expression else []),
            *(f"--pd-{name}={environment.folder / name}" for name in SIDES),
            f"--pd-side={side}", f"--pd-work={environment.folder}", f"--pd-logs={logs}",
            ROOT / "tests" / "pd",
        ],
        cwd=stage(),
        env={
            "PYTHONPATH": os.pathsep.join([str(environment.folder / side), str(stage())]),
            "PYTHONDONTWRITEBYTECODE": "",
        },
        timeout=_SIDE_S,
        check=False,
        stream=True,
    )  # fmt: skip
    if result.returncode not in WHOLE_RUN:
        raise CheckFailedError(
            f"pytest ended with {result.returncode}, before all scenarios had run",
            expected="0 or 1",
            next_step="read what it printed above",
        )
    return log


def enter(log: Path, side: str, scenarios: dict[str, Scenario]) -> None:
    """Enter what became of each test of a side."""
    for node, outcome in outcomes_of(log).items():
        scenarios.setdefault(node, Scenario(node)).outcomes[side] = outcome
    for row in map(json.loads, log.read_text(encoding="utf-8").splitlines()):
        if row["$report_type"] == "TestReport" and row.get("when") == "call":
            figures = dict(row["user_properties"])
            scenario = scenarios[row["nodeid"]]
            scenario.shows = tuple(figures.pop("shows", ()))
            scenario.figures[side] = figures


def faults_of(
    scenarios: dict[str, Scenario], sides: list[str], release: str, registry: Registry
) -> Iterator[str]:
    """Yield each outcome that is not what it has to be."""
    for node, scenario in scenarios.items():
        again = f"nox -s pd -- {release} -k {node.rpartition('::')[2].partition('[')[0]}"
        fixes = [registry.fix(fix_id) for fix_id in scenario.shows]
        shown = [
            fix
            for fix in fixes
            if fix.affects(release) and not any(is_of(node, t) for t in fix.spared_on(release))
        ]
        # What gets no patch on this release is there on patched as well.
        missing = {
            "stock": bool(shown),
            "patched": any(not fix.closed_by(release) for fix in shown),
        }
        for side, outcome in scenario.outcomes.items():
            expected = "failed" if missing[side] else "passed"
            if outcome.result != expected:
                where = f" ({outcome.place}: {outcome.message})" if outcome.place else ""
                said = f"{side}: {node} {outcome.result}, expected {expected}{where}"
                if outcome.raised == "harness":
                    said += "; that is the tests' own harness: mend it, then " + again
                yield said
            elif expected == "failed" and not outcome.is_assertion:
                yield (
                    f"{side}: {node} failed elsewhere: {outcome.place} {outcome.message}; expected "
                    f"an assertion of its own file; see to that, then {again}"
                )
        if "patched" in sides and "patched" not in scenario.outcomes:
            yield f"{node} did not run on patched"


def write_report(
    release: str, scenarios: dict[str, Scenario], seconds: dict[str, float], *, whole: bool
) -> None:
    """Write the report, or bring up to date what has run; and draw the picture from it."""
    path = REPORTS / f"pd-{release}.json"
    report: dict[str, Any] = {"release": release, "patch_set": project().version}
    before = {} if whole or not path.is_file() else json.loads(path.read_text(encoding="utf-8"))
    report["seconds"] = seconds if whole else before.get("seconds", {})
    entries = report["scenarios"] = before.get("scenarios", {})
    for node, scenario in scenarios.items():
        entry = entries.setdefault(node, {})
        entry["shows"] = scenario.shows
        for side, outcome in scenario.outcomes.items():
            figures = scenario.figures.get(side, {})
            entry[side] = {"result": outcome.result, "seen": outcome.message, **figures}
        if all("usage" in entry.get(side, {}) for side in SIDES):
            draw(release, {side: entry[side] for side in SIDES}, ROOT / "docs")
    path.write_text(_dumped(report), encoding="utf-8")


def _dumped(report: dict[str, Any]) -> str:
    """Return the report as JSON, with each pair of numbers on one line."""
    text = json.dumps(report, indent=2)
    return re.sub(r"\[\s+([-.\d]+),\s+([-.\d]+)\s+\]", r"[\1, \2]", text) + "\n"

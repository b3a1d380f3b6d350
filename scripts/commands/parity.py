"""`nox -s parity -- [RELEASE...] [-k NAME]`: patched against stock, where stock is right.

The other sessions compare a build with what is right. This one runs the scenarios of tests/parity
on the stock and on the patched wheel of a release, side by side in one environment, and compares
what could be seen: what a client was answered, what the engine core was sent, what a prefill server
was told and when, whether the engine lives, whether it is busy. A difference is a fault, for
a patched build is never worse than stock.

Where stock has the defect of one of our fixes the scenario is left out, with the reason; what is
right there is the business of `nox -s regressions`. What crashes on both sides shows nothing and
fails the session too.
"""

from __future__ import annotations

from collections.abc import Iterator
from shlex import quote

from rich.markup import escape
from rich.table import Table

from scripts.patchset.registry import load_registry
from scripts.project import project, supported_release
from scripts.prove.parity import Comparison, compare, write_report
from scripts.system.console import entry, err, out, parser_of
from scripts.system.errors import CheckFailedError

_SHOWN = 3  # faults of one scenario on the screen


def main() -> None:
    """Compare the releases that the command line names, or the default one."""
    parser = parser_of("parity", __doc__)
    parser.add_argument("release", nargs="*", default=[project().default_release])
    parser.add_argument("-k", dest="name", default="", help="scenarios with this in their name")
    options = parser.parse_args()
    registry = load_registry()
    faults: list[str] = []
    differing: list[tuple[str, str]] = []
    for release in map(supported_release, options.release):
        comparisons = compare(release, options.name, registry)
        write_report(release, comparisons)
        out.print(_table(release, comparisons))
        faults += [line for comparison in comparisons for line in _lines(release, comparison)]
        differing += [(release, one.scenario) for one in comparisons if one.faults]
    for fault in faults:
        err.print(f"✗ {fault}", markup=False)
    if faults:
        release, scenario = differing[0]
        raise CheckFailedError(
            "a patched build is not like stock, or nobody can tell",
            expected="the patched build like stock wherever stock is right",
            next_step="reports/ has every difference; to see the first again: "
            f"nox -s parity -- {release} -k {quote(scenario)}",
        )


def _lines(release: str, comparison: Comparison) -> Iterator[str]:
    """Yield the first faults of a scenario; one cause often shows in a hundred places."""
    for fault in comparison.faults[:_SHOWN]:
        yield f"{release}: {comparison.scenario}: {fault}"
    if (more := len(comparison.faults) - _SHOWN) > 0:
        yield f"{release}: {comparison.scenario}: … and {more} more"


def _table(release: str, comparisons: list[Comparison]) -> Table:
    table = Table("scenario", "", "CPU", "first fault, or why it is left out", title=release)
    for comparison in comparisons:
        seconds = " ".join(f"{one:.1f}" for one in comparison.seconds.values())
        words = comparison.faults[0] if comparison.faults else comparison.left_out
        mark = "✗" if comparison.faults else "-" if comparison.left_out else "✓"
        row = (comparison.scenario, f"{mark} {comparison.word}", seconds, words[:160])
        table.add_row(*map(escape, row))
    return table


if __name__ == "__main__":
    entry(main)

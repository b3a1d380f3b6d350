"""`nox -s status`: of each fix on each final release, where it stands, and how that is known.

    nox -s status                       from what is recorded, and from the releases' texts
    nox -s status -- --prove            runs what is not proven yet, release by release
    nox -s status -- --prove 0.22.1     only there

A cell is proven by the fix's regression tests: run on the stock release and, where a line serves
it, on the patched one (`records/proofs/`). A proof counts as long as wheel, tests and patches are
those that went into it. On an affected release it is one only if the tests that are `spared` there
pass on stock and all others fail. Without one, the texts give a hint: whether the fix's patch finds
all its lines in the release, word for word. A hint is shown as such. Where neither says anything,
the cell is unproven. `--prove` installs each release in turn and deletes it afterwards.

Writes docs/status.md, reports/status.html and reports/status.json; and, for programs, an OSV record
for each fix (reports/osv/) and an OpenVEX document of the patched builds (reports/openvex.json):
docs/advisories.md. Their time is that of the last commit, so these two need the whole history.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from scripts.patchset.registry import Registry, load_registry
from scripts.project import ROOT
from scripts.prove.advisories import edition, write_advisories
from scripts.prove.status import (
    PAGES,
    REPORT,
    Cell,
    State,
    all_cells,
    previous_cells,
    prove_missing,
    write,
)
from scripts.system.console import entry, err, out, parser_of
from scripts.system.errors import CheckFailedError, KvfixError
from scripts.upstream.lock import load_lock, pinned_release


def main() -> None:
    """Write the pages, after the runs that the command line asks for."""
    parser = parser_of("status", __doc__)
    parser.add_argument(
        "--prove", nargs="*", metavar="RELEASE", help="run the tests there, or everywhere"
    )
    options = parser.parse_args()
    registry = load_registry()
    failed: dict[str, str] = {}
    chosen: list[str] = []
    if options.prove is not None:
        chosen = [pinned_release(release) for release in options.prove or load_lock()]
        for release in chosen:
            try:
                prove_missing(release, registry)
            except KvfixError as error:  # the other releases can still be proven
                failed[release] = error.found
    cells = all_cells(registry, previous_cells())
    write(cells, registry)
    told = edition()
    if told is None:
        _tell(cells, [*PAGES, REPORT])
        err.print("no OSV, no OpenVEX: their time is that of a commit, and not all history is here")
    else:
        _tell(cells, [*PAGES, REPORT, *write_advisories(cells, registry, told)])
    for release, found in failed.items():
        err.print(f"✗ {release}: {found}", markup=False)
    if failed:
        raise CheckFailedError(
            f"{len(failed)} releases could not be run",
            expected="an environment for each",
            next_step="put right what is named above, then: "
            f"nox -s status -- --prove {' '.join(failed)}",
        )
    denied = [(one, line) for one in chosen for line in unexpected(one, cells[one], registry)]
    for _, line in denied:
        err.print(f"✗ {line}", markup=False)
    if denied:
        release = denied[0][0]
        raise CheckFailedError(
            f"{len(denied)} cells where tests contradict the registry",
            expected="each fix's tests to fail on stock where applies-to says so, but for those "
            "that are spared, and there alone; and to pass on patched",
            next_step=f"see docs/status.md, then: nox -s regressions -- {release}",
        )


def unexpected(release: str, row: dict[str, Cell], registry: Registry) -> Iterator[str]:
    """Yield where tests have run and show something else than the registry says."""
    for fix_id, cell in row.items():
        fix = registry.fixes[fix_id]
        if fix.closed_by(release):
            said = {State.PATCHED}
        else:
            said = {State.OPEN} if fix.affects(release) else {State.UPSTREAM, State.NOT_AFFECTED}
        if cell.runs and not (cell.proven and cell.state in said):
            yield f"{release}: {fix_id}: {' '.join(cell.why)}"


def _tell(cells: dict[str, dict[str, Cell]], written: Iterable[Path]) -> None:
    everything = [cell for row in cells.values() for cell in row.values()]
    for state in State:
        of_state = [cell for cell in everything if cell.state is state]
        out.print(f"{state.value:>14}  {len(of_state):4}, proven {_proven_count(of_state)}")
    for path in written:
        out.print(f"wrote {path.relative_to(ROOT)}", markup=False)


def _proven_count(cells: Iterable[Cell] | Sequence[Cell]) -> int:
    return sum(cell.proven for cell in cells)


if __name__ == "__main__":
    entry(main)

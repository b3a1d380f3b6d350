"""`nox -s mutants -- RELEASE|tools [MODULE...]`: would the tests notice a change of the code?

Every mutant is one small change of an overlay module that the release uses, run against the tests
of the overlay and of the fixes that the release needs; with `tools` in place of a release, of the
tools' core against its tests. What survives is a change that no test notices. Where no test could,
tests/mutants.toml names it and says why; of the others at most 5 % may survive.

A release has some 5700, for which two cores take hours; for a sample of 250, which tells the share
to a few percent, ten minutes; for a module with the tests beside it, a minute or two:
nox -s mutants -- 0.28.0 --sample 250
nox -s mutants -- 0.33.0 nixl/pairing --tests tests/overlay/distributed
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict

from rich.markup import escape
from rich.table import Table

from scripts.mutants.run import TOOLS, Chosen, Row, of_release, of_tools, rows_file
from scripts.mutants.verdict import SHARE, Verdict, judge, read_equivalents
from scripts.project import REPORTS, ROOT, supported_release
from scripts.prove.forks import AT_ONCE
from scripts.system.console import at_least, entry, err, out, parser_of
from scripts.system.errors import CheckFailedError, UsageError


def main() -> None:
    """Try the mutants and say who survived."""
    parser = parser_of("mutants", __doc__)
    parser.add_argument("release", help="a release, or: tools")
    parser.add_argument("module", nargs="*", help="parts of modules' paths; without any, all")
    parser.add_argument("--tests", nargs="+", default=[], help="files or folders, not all tests")
    parser.add_argument(
        "--survivors", action="store_true", help="only what survived in the run before"
    )
    parser.add_argument(
        "--sample", type=at_least(1), default=0, help="so many of them, chosen at random"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument(
        "--workers", type=at_least(1), default=AT_ONCE, help="processes at a time, 0.1 GB each"
    )
    options = parser.parse_args()
    tools = options.release == TOOLS
    release = TOOLS if tools else supported_release(options.release)
    equivalents = read_equivalents()
    chosen = Chosen(_survivors(release) if options.survivors else (), options.sample, options.seed)
    start = time.monotonic()
    err.print(f"each mutant, as it is tried: {rows_file(release).relative_to(ROOT)}")
    if tools:
        rows = of_tools(options.module, options.workers, options.tests, chosen)
    else:
        rows = of_release(release, options.module, options.workers, options.tests, chosen)
    verdict = judge(release, rows, equivalents, whole=chosen.all)
    _write(release, verdict)
    out.print(_table(release, verdict))
    err.print(f"{time.monotonic() - start:.0f} s")
    for row in verdict.survivors:
        where = f"{row['module'].replace('.', '/')}.py:{row['line']}"
        err.print(f"{row['verdict']}: {where} {row['function']}: {row['change']}", markup=False)
    for fault in verdict.faults:
        err.print(f"✗ {fault}", markup=False)
    if verdict.faults or verdict.share > SHARE:
        raise CheckFailedError(
            f"{release}: {len(verdict.survivors)} of {verdict.total.mutants} mutants survive "
            f"({verdict.share:.1%}) and are not named, and there are {len(verdict.faults)} faults",
            expected=f"at most {SHARE:.0%}, and no fault",
            next_step="write the test that notices it, delete code that nothing needs, or, where "
            "no test could notice it, name it in tests/mutants.toml and say why",
        )


def _table(release: str, verdict: Verdict) -> Table:
    names = ("mutants", "killed", "hung", "survived", "not covered", "equivalent")
    table = Table("module", *names, title=release)
    every = {**verdict.counts, "all": verdict.total}
    for module, count in every.items():
        numbers = [getattr(count, name.replace(" ", "_")) for name in names]
        table.add_row(escape("/".join(module.split(".")[-2:])), *map(str, numbers))
    return table


def _survivors(release: str) -> list[Row]:
    """Return what survived, by the report of the run before."""
    path = REPORTS / f"mutants-{release}.json"
    if not path.is_file():
        raise UsageError(
            f"there is no report of an earlier run: {path.relative_to(ROOT)}",
            expected="one whose survivors can be tried again",
            next_step=f"nox -s mutants -- {release}",
        )
    survivors: list[Row] = json.loads(path.read_text(encoding="utf-8"))["survivors"]
    return survivors


def _write(release: str, verdict: Verdict) -> None:
    report = {
        "release": release,
        "modules": {module: asdict(count) for module, count in verdict.counts.items()},
        "survivors": verdict.survivors,
        "faults": verdict.faults,
    }
    path = REPORTS / f"mutants-{release}.json"
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    err.print(f"written: {path.relative_to(ROOT)}")


if __name__ == "__main__":
    entry(main)

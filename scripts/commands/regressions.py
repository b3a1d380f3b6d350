"""`nox -s regressions -- RELEASE...`: each defect on the stock release, and none on the patched.

For each release, in one environment and some at a time: the tests of tests/regressions run on the
stock wheel, on the patched wheel, which lies beside it, and, for each fix, on the stock files with
that fix alone (and what it depends on). Each run is a fork of one process that has imported torch
and transformers (tests/programs/forks.py). What a fix does alone is taken from `records/proofs/`
where the release, the tests of all fixes, its patch and the code that this reaches are those of
that run, and it had no fault; `--again` runs it all the same. Only a session of all fixes puts it
there. A fix passes only if

- each of its tests fails on stock, and at least one by an assertion of its own file;
- each passes on the patched wheel;
- alone, it makes its own tests and those of what it depends on pass, and changes no others.

A release also has to answer the handshake with one hash, stock or patched, for a fleet is rolled
engine by engine. Where the registry says that a release does not have the defect, or not the part
that a test is about (`spared`), the tests have to pass on stock. A test that is skipped, or that
errors, be it in a helper of the tests, proves nothing and fails the session on either side. A fix
that is left open there on purpose (`unpatched`) is left out; where that is so of a part of it, the
part's tests are. Where another one closes it (`closed-by`), that one is what stands alone.
"""

from __future__ import annotations

from rich.table import Table

from scripts.patchset.choice import fix_ids
from scripts.patchset.registry import load_registry
from scripts.project import project, supported_release
from scripts.prove.alone import Alone, held, keys_alone, passed, record_alone
from scripts.prove.key import inputs
from scripts.prove.outcomes import Outcome, Outcomes
from scripts.prove.record import record
from scripts.prove.regressions import ReleaseVerdict, Verdict, prove_release, write_report
from scripts.system.console import entry, err, out, parser_of
from scripts.system.errors import CheckFailedError, UsageError


def main() -> None:
    """Run the releases that the command line names, or the default one."""
    parser = parser_of("regressions", __doc__)
    parser.add_argument("release", nargs="*", default=[project().default_release])
    parser.add_argument(
        "--fix", action="extend", type=fix_ids, metavar="ID,…", help="only these; repeatable"
    )
    parser.add_argument(
        "--again",
        action="store_true",
        help="run each fix alone on all tests: where that is on record, and where it touches none",
    )
    options = parser.parse_args()
    registry = load_registry()
    if unknown := set(options.fix or ()) - registry.fixes.keys():
        raise UsageError(
            f"no fix is called {', '.join(sorted(unknown))}",
            expected=f"some of {', '.join(registry.fixes)}",
            next_step=f"for example: nox -s regressions -- --fix {next(iter(registry.fixes))}",
        )
    wanted = options.fix or list(registry.fixes)
    faults: list[str] = []
    for release in map(supported_release, options.release):
        asked = [registry.fixes[fix_id] for fix_id in wanted]
        fixes = [fix for fix in asked if fix.closed_by(release) or not fix.affects(release)]
        if options.fix and (left := [fix.id for fix in asked if fix not in fixes]):
            raise UsageError(
                f"{release} has no patch for {', '.join(left)}",
                expected="a fix whose patch can be compared with stock",
                next_step=f"which releases have one: docs/fixes.md#{left[0].lower()}",
            )
        before = [
            (fix, inputs(fix, release, "stock"), inputs(fix, release, "patched")) for fix in fixes
        ]
        keys = keys_alone(release, registry)
        known = {} if options.again else held(release, keys)
        proof = prove_release(release, fixes, registry, known, whole=options.again)
        out.print(_table(proof))
        out.print(_said_alone(proof))
        write_report(proof)
        for (fix, stock, patched), verdict in zip(before, proof.verdicts, strict=True):
            record(release, "stock", [(fix, stock)], verdict.stock)
            record(release, "patched", [(fix, patched)], verdict.patched)
        # Fewer tests than all show too little to be kept, but enough to doubt what was kept.
        record_alone(
            release,
            {
                one: Alone(keys[one], passed(outcomes)) if outcomes is not None else None
                for one, outcomes in proof.alone.items()
                if outcomes is None or not options.fix
            },
        )
        of_fixes = [fault for verdict in proof.verdicts for fault in verdict.faults]
        faults += [f"{release}: {fault}" for fault in (*proof.faults, *of_fixes)]
    for fault in faults:
        err.print(f"✗ {fault}", markup=False)
    if faults:
        raise CheckFailedError(
            f"{len(faults)} faults",
            expected="every test fails on stock and passes on patched",
            next_step="see reports/ for each test's outcome and failing line",
        )


def _table(proof: ReleaseVerdict) -> Table:
    title = f"vLLM {proof.release}"
    table = Table("fix", "stock", "patched", "alone", "seen on stock", title=title)
    for verdict in proof.verdicts:
        line = next((o for o in verdict.stock.values() if o.is_assertion), Outcome(""))
        table.add_row(
            verdict.fix,
            _count(verdict.stock) + ("" if verdict.affected else " (not affected)"),
            _count(verdict.patched),
            _alone(verdict),
            f"{line.place} {line.message}"[:90],
        )
    return table


def _alone(verdict: Verdict) -> str:
    if verdict.faults or not verdict.affected:
        return "✗" if verdict.faults else "-"
    return "✓ on record" if verdict.on_record else "✓"


def _said_alone(proof: ReleaseVerdict) -> str:
    """Say which fixes were run alone, and of which that is on record."""
    ran, taken = sorted(proof.alone), sorted(proof.taken)
    said = f"alone: {len(ran)} run now ({', '.join(ran) or 'none'})"
    return f"{said}, {len(taken)} on record ({', '.join(taken) or 'none'})"


def _count(outcomes: Outcomes) -> str:
    results = [outcome.result for outcome in outcomes.values()]
    return ", ".join(f"{results.count(result)} {result}" for result in sorted({*results}))


if __name__ == "__main__":
    entry(main)

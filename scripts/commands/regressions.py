"""`nox -s regressions -- RELEASE...`: each defect on the stock release, and none on the patched.

For each release, in one environment: the tests of tests/regressions run on the stock wheel, then
on the patched wheel that is installed in its place, and then, for each fix, on the stock files
with that fix alone (and what it depends on). A fix passes only if

- each of its tests fails on stock, and at least one by an assertion of ours about behaviour;
- each passes on the patched wheel;
- alone, it turns its own tests and those of what it depends on, and nobody else's.

A release also has to answer the handshake with one hash, stock or patched, for a fleet is rolled
engine by engine. Where the registry says that a release does not have the defect, or not the part
that a test is about (`spared`), the tests have to pass on stock. A test that errors or is skipped
proves nothing and fails the session. A fix that has no patch there on purpose (`unpatched`) is left
out; where that is so of a part of it, the part's tests are.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from rich.table import Table

from scripts.environment import Environment, stage
from scripts.patchset.registry import Fix, Registry, load_registry
from scripts.patchset.series import Series, load_series
from scripts.project import REPORTS, ROOT, project, supported_release
from scripts.proofs import inputs, of_fix, record
from scripts.pytest_run import Outcome, is_of, run_pytest
from scripts.system.console import entry, err, out
from scripts.system.errors import CheckFailedError, UsageError
from scripts.system.process import run
from scripts.upstream.lock import locked_release
from scripts.wheel.build import patched_wheel

Outcomes = dict[str, Outcome]


@dataclass
class Verdict:
    """What the runs say of one fix on one release."""

    fix: str
    affected: bool
    stock: Outcomes
    patched: Outcomes
    alone: Outcomes = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


class Identity(NamedTuple):
    """What an installed wheel says to a peer: its version, and the hash of its handshake."""

    version: str
    handshake: str


@dataclass(frozen=True)
class Proof:
    """What the runs say of one release; `faults` are those that belong to no single fix."""

    release: str
    verdicts: list[Verdict]
    identities: dict[str, Identity]
    faults: list[str]


def main() -> None:
    """Run the releases that the command line names, or the default one."""
    parser = argparse.ArgumentParser(
        prog="nox -s regressions --",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("release", nargs="*", default=[project().default_release])
    parser.add_argument("--fix", action="append", metavar="ID", help="only this fix; repeatable")
    options = parser.parse_args()
    registry = load_registry()
    if unknown := set(options.fix or ()) - registry.fixes.keys():
        raise UsageError(
            f"no fix is called {', '.join(sorted(unknown))}",
            expected=f"some of {', '.join(registry.fixes)}",
            next_step="nox -s regressions -- --fix 40449",
        )
    wanted = options.fix or list(registry.fixes)
    faults: list[str] = []
    for release in map(supported_release, options.release):
        asked = [registry.fixes[fix_id] for fix_id in wanted]
        fixes = [fix for fix in asked if not fix.unpatched_on(release)]
        before = [
            (fix, inputs(fix, release, "stock"), inputs(fix, release, "patched")) for fix in fixes
        ]
        proof = prove(release, fixes, registry)
        out.print(_table(proof))
        _write_report(proof)
        for (fix, stock, patched), verdict in zip(before, proof.verdicts, strict=True):
            record(release, "stock", [(fix, stock)], verdict.stock)
            record(release, "patched", [(fix, patched)], verdict.patched)
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


def prove(release: str, fixes: list[Fix], registry: Registry) -> Proof:
    """Run all sides of `release` and return what they say of `fixes`."""
    series = load_series(locked_release(release).line)
    environment = Environment(release).make()
    paths = sorted({test.partition("::")[0] for fix in fixes for test in fix.tests})
    wheels = {"stock": environment.stock, "patched": patched_wheel(release)}
    sides: dict[str, Outcomes] = {}
    identities: dict[str, Identity] = {}
    for side, wheel in wheels.items():
        err.print(f"{release}: {side} ...")
        environment.install(wheel)
        sides[side] = run_pytest(environment, paths)
        identities[side] = _identity(environment)
    environment.install(environment.stock)
    patched_fixes = [fix for fix in fixes if fix.id in series.fix_ids]
    # Two at a time: a run is one process on one core, and takes 1.5 GB.
    with ThreadPoolExecutor(max_workers=2) as pool:
        alone = pool.map(
            lambda fix: _alone(environment, series, fix, registry, paths), patched_fixes
        )
        alone_by_fix = dict(zip((fix.id for fix in patched_fixes), alone, strict=True))
    verdicts = []
    for fix in fixes:
        verdict = Verdict(
            fix=fix.id,
            affected=fix.affects(release),
            stock=of_fix(fix, release, sides["stock"]),
            patched=of_fix(fix, release, sides["patched"]),
            alone=alone_by_fix.get(fix.id, {}),
        )
        verdict.faults += _faults(verdict, fixes, release, registry)
        verdicts.append(verdict)
    return Proof(release, verdicts, identities, list(_split(identities, registry, series)))


def _identity(environment: Environment) -> Identity:
    """Ask the installed vLLM for its version and for the hash that its handshake compares."""
    result = run(
        [environment.python, "-W", "ignore", "-m", "tests.handshake_hash"],
        cwd=stage(),
        env=environment.variables(None),
        timeout=300,
    )
    version, handshake = result.stdout.splitlines()[-1].split()
    return Identity(version, handshake)


def _split(identities: dict[str, Identity], registry: Registry, series: Series) -> Iterator[str]:
    """Yield what would keep stock and patched engines of one fleet apart, or mix them up."""
    stock, patched = identities["stock"], identities["patched"]
    if stock.version == patched.version:
        yield f"the stock and the patched wheel both call themselves {stock.version}"
    changes = [i for i in series.fix_ids if registry.fixes[i].wire_compat.startswith("breaks")]
    if (stock.handshake == patched.handshake) == bool(changes):
        yield (
            f"handshake hashes: stock {stock.handshake}, patched {patched.handshake}; "
            f"fixes that break the wire: {', '.join(changes) or 'none'}"
        )


def _alone(
    environment: Environment, series: Series, fix: Fix, registry: Registry, paths: list[str]
) -> Outcomes:
    err.print(f"{environment.release}: {fix.id} alone ...")
    patches = series.only([fix.id], registry)
    folder = ROOT / ".nox" / f"alone-{environment.release}-{fix.id}"
    try:
        shadow = environment.shadow(folder, patches)
        return run_pytest(environment, paths, shadow=shadow)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _faults(verdict: Verdict, fixes: list[Fix], release: str, registry: Registry) -> Iterator[str]:
    for test in registry.fixes[verdict.fix].tests:
        for side, outcomes in (("stock", verdict.stock), ("patched", verdict.patched)):
            if not any(is_of(node, test) for node in outcomes):
                yield f"{verdict.fix}, {side}: {test} did not run"
    for node in sorted(verdict.stock.keys() ^ verdict.patched.keys()):
        yield f"{verdict.fix}: {node} ran on one side only"
    yield from _unlike_stock(
        verdict.fix, "stock", verdict.stock, registry.fixes[verdict.fix], release
    )
    yield from _unlike(verdict.fix, "patched", verdict.patched, "passed")
    if not verdict.affected:
        return
    if not any(outcome.is_assertion for outcome in verdict.stock.values()):
        yield f"{verdict.fix}: no test fails on stock by an assertion about behaviour"
    turned = registry.with_dependencies({verdict.fix})
    for fix in fixes:
        own = of_fix(fix, release, verdict.alone)
        if fix.id in turned:
            yield from _unlike(verdict.fix, f"alone, tests of {fix.id}", own, "passed")
        elif fix.affects(release):
            yield from _unlike_stock(verdict.fix, f"alone, tests of {fix.id}", own, fix, release)


def _unlike_stock(
    name: str, side: str, outcomes: Outcomes, fix: Fix, release: str
) -> Iterator[str]:
    """Yield which tests of `fix` do not do what they do without it."""
    if not fix.affects(release):
        yield from _unlike(name, side, outcomes, "passed")
        return
    failing = dict(outcomes)
    for test in fix.spared_on(release):
        passing = {node: failing.pop(node) for node in outcomes if is_of(node, test)}
        yield from _unlike(name, f"{side}, spared {test}", passing, "passed")
    yield from _unlike(name, side, failing, "failed")


def _unlike(fix: str, side: str, outcomes: Outcomes, expected: str) -> Iterator[str]:
    if not outcomes:
        yield f"{fix}, {side}: no test ran"
    for node, outcome in outcomes.items():
        if outcome.result != expected:
            where = f" ({outcome.place}: {outcome.message})" if outcome.place else ""
            yield f"{fix}, {side}: {node} {outcome.result}, expected {expected}{where}"


def _table(proof: Proof) -> Table:
    title = f"vLLM {proof.release}"
    table = Table("fix", "stock", "patched", "alone", "seen on stock", title=title)
    for verdict in proof.verdicts:
        line = next((o for o in verdict.stock.values() if o.is_assertion), Outcome(""))
        table.add_row(
            verdict.fix,
            _count(verdict.stock) + ("" if verdict.affected else " (not affected)"),
            _count(verdict.patched),
            "✗" if verdict.faults else ("✓" if verdict.affected else "-"),
            f"{line.place} {line.message}"[:90],
        )
    return table


def _count(outcomes: Outcomes) -> str:
    results = [outcome.result for outcome in outcomes.values()]
    return ", ".join(f"{results.count(result)} {result}" for result in sorted({*results}))


def _write_report(proof: Proof) -> None:
    REPORTS.mkdir(exist_ok=True)
    report = {
        "release": proof.release,
        "patch_set": project().version,
        "identities": {side: one._asdict() for side, one in proof.identities.items()},
        "fixes": {verdict.fix: _as_json(verdict) for verdict in proof.verdicts},
    }
    path = REPORTS / f"regressions-{proof.release}.json"
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def _as_json(verdict: Verdict) -> dict[str, object]:
    document = asdict(verdict)
    del document["fix"], document["alone"]
    document["flips_alone"] = not any("alone" in fault for fault in verdict.faults)
    return document


if __name__ == "__main__":
    entry(main)

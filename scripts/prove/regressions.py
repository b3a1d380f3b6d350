"""The tests of the fixes on one release: on stock, on patched, and with each fix alone.

What a fix does alone may be on record (`scripts.prove.alone`); stock and patched are always run.
Alone it is run on the tests that it can touch (`scripts.prove.touched`).

Each test of a fix has to fail on an affected stock release, and one at least by an assertion of its
own file: only that counts as "fails on stock" (`Outcome.is_assertion`). An exception of the
release's own fails a test too. What the tests' harness raises is an error, and a fault of the
session on whichever side it happens, stock included.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from scripts.patchset.registry import Fix, Registry
from scripts.patchset.series import Series
from scripts.patchset.target import Target
from scripts.project import REPORTS, ROOT, project
from scripts.prove.alone import Alone
from scripts.prove.environment import Environment
from scripts.prove.forks import Fork
from scripts.prove.outcomes import Outcomes, is_of
from scripts.prove.pytest import Run, run_together
from scripts.prove.record import of_fix
from scripts.prove.starts import check_starts, starting
from scripts.prove.touched import PLUGIN, Entered, changed_by
from scripts.system.console import err
from scripts.system.errors import CommandError
from scripts.system.process import Finished
from scripts.wheel.build import patched_wheel


@dataclass
class Verdict:
    """What the runs say of one fix on one release; `on_record` if `alone` comes from there."""

    fix: str
    affected: bool
    stock: Outcomes
    patched: Outcomes
    alone: Outcomes = field(default_factory=dict)
    on_record: bool = False
    faults: list[str] = field(default_factory=list)


class Identity(NamedTuple):
    """What an installed wheel says to a peer: its version, and the hash of its handshake."""

    version: str
    handshake: str


@dataclass(frozen=True)
class ReleaseVerdict:
    """What the runs say of one release.

    Attributes:
        release: In its normal form.
        verdicts: What they say of each fix.
        identities: What stock and patched say to a peer.
        faults: Those that belong to no single fix.
        alone: By each fix that was run alone, the outcomes that were judged; None where they are
            not to be kept.
        taken: The fixes whose outcomes alone were all taken from the record.
    """

    release: str
    verdicts: list[Verdict]
    identities: dict[str, Identity]
    faults: list[str]
    alone: dict[str, Outcomes | None]
    taken: set[str]


def prove_release(
    release: str, fixes: list[Fix], registry: Registry, held: Mapping[str, Alone], *, whole: bool
) -> ReleaseVerdict:
    """Run the sides of `release` and return what they say of `fixes`.

    Args:
        release: In its normal form.
        fixes: Whose tests are run, and which are run alone.
        registry: All fixes.
        held: By fix, what is taken from the record instead of a run of it alone, or of a part.
        whole: Whether a fix alone is run on the tests as well that it cannot touch.

    Raises:
        CheckFailedError: A process of the patched build does not start.
    """
    series = Target.of(release).series
    environment = Environment(release).make()
    environment.install(environment.stock)
    patched = environment.beside("patched", patched_wheel(release))
    sides = {"stock": None, "patched": patched}
    folder = ROOT / ".nox" / f"alone-{release}"
    try:
        affecting = [fix for fix in fixes if fix.affects(release)]
        missing = {
            one: [fix for fix in affecting if one not in held or fix.id not in held[one].inputs]
            for one in sorted({fix.closed_by(release) for fix in fixes} & {*series.fix_ids})
        }
        alone = {
            one: environment.shadow(folder / one, series.only([one], registry))
            for one, unknown in missing.items()
            if unknown
        }
        err.print(f"{release}: stock and patched ...")
        runs = {name: Run(_files(fixes), shadow) for name, shadow in sides.items()}
        noted = folder / "entered.json"
        if alone and not whole:
            runs["entered"] = Run(_files(fixes), None, ["-p", PLUGIN, "--entered", str(noted)])
        asking = [Fork(["tests.programs.handshake_hash"], shadow) for shadow in sides.values()]
        outcomes, ended = run_together(environment, runs, *asking, *starting(patched))
        answers, started = ended[: len(asking)], ended[len(asking) :]
        check_starts(release, started)
        stock = outcomes["stock"]
        entered = Entered.read(noted, outcomes.get("entered", {}), stock)
        if "entered" in runs and (dark := stock.keys() - entered.by_test.keys()):
            err.print(f"{len(dark)} tests are run with all, as what they enter is not known")
        runs.clear()
        for one, shadow in alone.items():
            asked = {node for fix in missing[one] for node in of_fix(fix, release, stock)}
            touched = {*asked}
            if not whole:
                touched = entered.touched(asked, changed_by(release, series.only([one], registry)))
            for needed in registry.with_dependencies({one}):
                touched |= asked & of_fix(registry.fixes[needed], release, stock).keys()
            outcomes[one] = {node: stock[node] for node in asked - touched}
            if touched:
                runs[one] = Run([node for node in stock if node in touched], shadow)
        count = sum(len(run.paths) for run in runs.values())
        err.print(f"{release}: {len(runs)} fixes alone, {count} tests ...")
        for one, found in run_together(environment, runs)[0].items() if runs else ():
            outcomes[one] |= found
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    identities = {
        side: _identity(side, answer) for side, answer in zip(sides, answers, strict=True)
    }
    for one, unknown in missing.items():
        known = [fix for fix in affecting if fix not in unknown]
        nodes = {n for fix in known for n in of_fix(fix, release, outcomes["stock"])}
        if known:
            outcomes[one] = held[one].outcomes(nodes) | outcomes.get(one, {})
    verdicts = []
    ran: dict[str, Outcomes | None] = {}
    for fix in fixes:
        closing = fix.closed_by(release)
        verdict = Verdict(
            fix=fix.id,
            affected=fix.affects(release),
            stock=of_fix(fix, release, outcomes["stock"]),
            patched=of_fix(fix, release, outcomes["patched"]),
            alone=outcomes.get(closing, {}),
            on_record=closing in missing and closing not in alone,
        )
        verdict.faults += _faults(verdict, fixes, release, registry)
        verdicts.append(verdict)
        if closing in alone:
            ran[closing] = _sound(verdict, outcomes["stock"], fixes, release, registry)
    split = list(_split(identities, registry, series))
    return ReleaseVerdict(release, verdicts, identities, split, ran, missing.keys() - alone.keys())


def _files(fixes: list[Fix]) -> list[str]:
    return sorted({test.partition("::")[0] for fix in fixes for test in fix.tests})


def _sound(
    verdict: Verdict, stock: Outcomes, fixes: list[Fix], release: str, registry: Registry
) -> Outcomes | None:
    """Return those outcomes of the fix alone that were judged; None where they are not to be kept.

    That is where one is a fault, and where other tests ran than on `stock`, for what is on record
    says which tests passed and not which there were.
    """
    judged: Outcomes = {}
    for fix in fixes:
        if fix.affects(release):
            own = of_fix(fix, release, verdict.alone)
            if own.keys() != of_fix(fix, release, stock).keys():
                return None
            judged.update(own)
    return None if any(_faults_alone(verdict, fixes, release, registry)) else judged


def _identity(side: str, answer: Finished) -> Identity:
    """Read what the vLLM of `side` calls itself, and the hash that its handshake compares.

    Raises:
        CommandError: It could not say.
    """
    words = (answer.stdout.splitlines() or [""])[-1].split()
    if answer.returncode or len(words) != len(Identity._fields):
        raise CommandError(
            f"{side}: tests.programs.handshake_hash ended with {answer.returncode}:\n"
            f"{(answer.stderr or answer.stdout)[-4000:]}",
            expected="a version and a hash on its last line",
            next_step="mend tests/programs/handshake_hash.py, or what it reaches",
        )
    return Identity(*words)


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


def _faults(verdict: Verdict, fixes: list[Fix], release: str, registry: Registry) -> Iterator[str]:
    for test in registry.fixes[verdict.fix].tests:
        for side, outcomes in (("stock", verdict.stock), ("patched", verdict.patched)):
            if not any(is_of(node, test) for node in outcomes):
                yield f"{verdict.fix}, {side}: {test} did not run"
    for node in sorted(verdict.stock.keys() ^ verdict.patched.keys()):
        yield f"{verdict.fix}: {node} ran on one side only"
    yield from unlike_stock(
        verdict.fix, "stock", verdict.stock, registry.fixes[verdict.fix], release
    )
    yield from _unlike(verdict.fix, "patched", verdict.patched, "passed", release)
    if not verdict.affected:
        return
    if not any(outcome.is_assertion for outcome in verdict.stock.values()):
        seen = sorted({f"{o.result} ({o.raised or '-'})" for o in verdict.stock.values()})
        yield (
            f"{verdict.fix}: no test fails on stock by an assertion about behaviour in its own "
            f"file; found {', '.join(seen) or 'no test'}, expected one at least that failed "
            f"(test); {_again(verdict.fix, release)}"
        )
    yield from _faults_alone(verdict, fixes, release, registry)


def _faults_alone(
    verdict: Verdict, fixes: list[Fix], release: str, registry: Registry
) -> Iterator[str]:
    """Yield which tests of all `fixes` this one alone, with what it needs, turns or does not."""
    closing = registry.fixes[verdict.fix].closed_by(release)
    turned = registry.with_dependencies({closing})
    for fix in fixes:
        own = of_fix(fix, release, verdict.alone)
        if fix.closed_by(release) in turned:
            yield from _unlike(verdict.fix, f"alone, tests of {fix.id}", own, "passed", release)
        elif fix.affects(release):
            yield from unlike_stock(verdict.fix, f"alone, tests of {fix.id}", own, fix, release)


def unlike_stock(name: str, side: str, outcomes: Outcomes, fix: Fix, release: str) -> Iterator[str]:
    """Yield which tests of `fix` do not do what they do without it, as the registry has it.

    Args:
        name: The fix that was run.
        side: How that run is called.
        outcomes: Those of the tests of `fix` there.
        fix: Whose tests they are.
        release: In its normal form.
    """
    if not fix.affects(release):
        yield from _unlike(name, side, outcomes, "passed", release)
        return
    failing = dict(outcomes)
    for test in fix.spared_on(release):
        if test.startswith("tests/pd/"):
            continue  # of a deployment, see scripts/pd
        passing = {node: failing.pop(node) for node in outcomes if is_of(node, test)}
        yield from _unlike(name, f"{side}, spared {test}", passing, "passed", release)
    yield from _unlike(name, side, failing, "failed", release)


def _unlike(fix: str, side: str, outcomes: Outcomes, expected: str, release: str) -> Iterator[str]:
    if not outcomes:
        yield f"{fix}, {side}: no test ran"
    for node, outcome in outcomes.items():
        if outcome.result != expected:
            seen = ": ".join(filter(None, (outcome.place, outcome.message)))
            where = f" ({seen})" if seen else ""
            said = f"{fix}, {side}: {node} {outcome.result}, expected {expected}{where}"
            if outcome.raised == "harness":
                said += (
                    "; that is the tests' own harness, which says nothing of the release: mend it, "
                    f"then {_again(fix, release)}"
                )
            yield said


def _again(fix: str, release: str) -> str:
    return f"nox -s regressions -- {release} --fix {fix}"


def write_report(proof: ReleaseVerdict) -> None:
    """Write `reports/regressions-<release>.json`."""
    REPORTS.mkdir(exist_ok=True)
    report = {
        "release": proof.release,
        "patch_set": project().version,
        "identities": {side: one._asdict() for side, one in proof.identities.items()},
        "fixes": {verdict.fix: as_json(verdict) for verdict in proof.verdicts},
    }
    path = REPORTS / f"regressions-{proof.release}.json"
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def as_json(verdict: Verdict) -> dict[str, object]:
    """Return what the report says of one fix."""
    document = asdict(verdict)
    del document["fix"], document["alone"]
    document["flips_alone"] = not any("alone" in fault for fault in verdict.faults)
    return document

"""Each release carried to as if it had just come out, and what came out of that."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from packaging.version import Version

from scripts.carry.merge import Status
from scripts.carry.state import Result
from scripts.carry.trial import Trial, try_all
from scripts.patchset.overlay import overlay_files
from scripts.patchset.registry import Fix, Registry, Spared, load_registry
from scripts.patchset.target import Target
from scripts.project import RECORDS, ROOT, project
from scripts.prove.environment import Environment
from scripts.prove.pytest import run_pytest
from scripts.prove.record import of_fix
from scripts.prove.stock import Stock, judge, on_record
from scripts.system.console import err
from scripts.system.errors import UnknownReleaseError
from scripts.system.files import replace_text
from scripts.upstream.history import upstream
from scripts.upstream.lock import load_lock

_FIRST = Version("0.20.0")
_RECORD = RECORDS / "proofs" / "replay.json"  # what was tested is asked again
_PAGE = ROOT / "docs" / "replay.md"
_CARRIED = (Status.CARRIED, Status.OFFSETS, Status.MERGED)


@dataclass(frozen=True)
class Transition:
    """One release carried to: from where, what came out, and what the tests of it say.

    `proven` has, for each fix whose carried form was tested, whether all of its tests passed.
    """

    release: str
    source: str
    results: tuple[Result, ...]
    proven: dict[str, bool]


def _pairs() -> list[tuple[str, str]]:
    """Return each release with the newest supported release that is older."""
    supported = sorted(project().releases, key=Version)
    pairs = []
    for release in load_lock():
        older = [one for one in supported if Version(one) < Version(release)]
        if Version(release) >= _FIRST and older:
            pairs.append((release, older[-1]))
    return pairs


def replay_all(proving: Collection[str]) -> list[Transition]:
    """Replay every transition; run the tests of what was carried to the releases `proving`.

    Raises:
        UnknownReleaseError: One of them is no release that is carried to.
    """
    pairs = _pairs()
    releases = [release for release, _ in pairs]
    if unknown := [release for release in proving if release not in releases]:
        raise UnknownReleaseError(
            f"nothing is carried to {', '.join(unknown)}",
            expected=f"some of {', '.join(releases)}",
            next_step=f"nox -s replay -- --prove {releases[-1]}" if releases else "nox -s replay",
        )
    before = _proven_before()
    transitions = []
    for release, source in pairs:
        err.print(f"{source} → {release} ...")
        transition, trial = replay(source, release)
        if release in proving:
            transition = replace(transition, proven=_run_carried(release, source, trial))
        else:
            transition = replace(transition, proven=before.get(_key(_row(transition)), {}))
        transitions.append(transition)
    return transitions


def write(transitions: Sequence[Transition]) -> None:
    """Write the record and the page."""
    replace_text(_RECORD, json.dumps([_row(one) for one in transitions], indent=1) + "\n")
    replace_text(_PAGE, as_markdown(transitions))


def replay(source: str, release: str) -> tuple[Transition, Trial]:
    """Carry the line of `source` to `release`, by text and by what the record says of stock."""
    registry = load_registry()
    unknowing = {fix.id: _as_of(fix, source) for fix in registry.fixes.values()}
    series = Target.of(source).series
    said = on_record(release, list(unknowing.values()))
    trial = try_all(upstream(), series, source, release, Registry("", unknowing), said)
    return Transition(release, source, tuple(trial.results), {}), trial


def _as_of(fix: Fix, source: str) -> Fix:
    """Return what was known of `fix` when `source` was the newest: not where its defect ends."""
    spared = fix.spared_on(source)
    return replace(fix, applies_to=">=0", spared=(Spared(">=0", spared, ""),) if spared else ())


def _run_carried(release: str, source: str, trial: Trial) -> dict[str, bool]:
    """Run the tests of what was carried on the stock files with that, and nothing else."""
    registry = load_registry()
    fixes = [registry.fixes[one.fix] for one in trial.results if one.status in _CARRIED]
    environment = Environment(release).make()
    environment.install(environment.stock)
    carried = {fix.id for fix in fixes}
    patches = [patch for patch in Target.of(source).patches if patch.fix_id in carried]
    folder = ROOT / ".nox" / f"replay-{release}"
    try:
        shadow = environment.shadow(folder, ())
        files = {path: text.encode() for path, text in trial.texts.items()}
        for path, data in {**files, **overlay_files(patches)}.items():
            target = shadow / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)  # the link, not the file that it shares
            target.write_bytes(data)
        paths = sorted({test.partition("::")[0] for fix in fixes for test in fix.tests})
        outcomes = run_pytest(environment, paths, shadow=shadow)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    proven = {}
    for fix in fixes:
        own = of_fix(fix, release, outcomes)
        proven[fix.id] = judge(replace(fix, spared=()), release, own) is Stock.PASSES
    return proven


def _row(one: Transition) -> dict[str, object]:
    fates = {
        result.fix: {"status": result.status.value, "stock": result.proof.value}
        for result in one.results
    }
    return {"release": one.release, "from": one.source, "fixes": fates, "proven": one.proven}


def _proven_before() -> dict[str, dict[str, bool]]:
    """Return what earlier proofs of the same fates said."""
    if not _RECORD.is_file():
        return {}
    rows = json.loads(_RECORD.read_text(encoding="utf-8"))
    return {_key(row): row["proven"] for row in rows if row["proven"]}


def _key(row: Mapping[str, object]) -> str:
    return json.dumps([row["release"], row["from"], row["fixes"]])


def as_markdown(transitions: Sequence[Transition]) -> str:
    """Return the table, and what it adds up to."""
    parts = [
        "# Replay\n<!-- made by `nox -s replay` -->\n",
        "Each release, carried to as if it had just come out, from the newest supported release "
        "before it. Of the registry only what it says of that one counts. *Left behind*: the stock "
        "release's own tests are on record as passing, so the fix is not carried. *Carried* is by "
        "text; *pass* says how many of them had their tests run on the result and passed, - that "
        "they were not run here. *Not needed*: carried, though the stock release is on record as "
        "not having the defect; that would be wrong. *A person*: it would have stopped there.\n",
        "| release | from | carried | by offsets | merged | pass | not needed | left behind "
        "| a person | stock on record |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    total: Counter[str] = Counter()
    for one in transitions:
        count = Counter(result.status for result in one.results)
        carried = [result for result in one.results if result.status in _CARRIED]
        needless = sum(result.proof is Stock.PASSES for result in carried)
        person = sum(result.status.stops for result in one.results)
        recorded = sum(result.proof is not Stock.NOT_RUN for result in one.results)
        passed = sum(one.proven.values())
        shown = f"{passed} of {len(one.proven)}" if one.proven else "-"
        parts.append(
            f"| {one.release} | {one.source} | {len(carried)} | {count[Status.OFFSETS]} "
            f"| {count[Status.MERGED]} | {shown} | {needless} | {count[Status.UPSTREAM]} "
            f"| {person} | {recorded} of {len(one.results)} |"
        )
        total.update(
            fixes=len(one.results),
            carried=len(carried),
            left=count[Status.UPSTREAM],
            person=person,
            tested=len(one.proven),
            passed=passed,
        )
    parts.append(
        f"\nOf {total['fixes']} times that a fix met a release, {total['carried']} were carried "
        f"without a hand, {total['left']} were left behind by proof and {total['person']} need a "
        f"person. Of those carried, {total['tested']} were tested, and {total['passed']} passed. "
        "What is carried by text and fails its tests does not land: `nox -s rebase` tests it "
        "before it puts anything into place.\n"
    )
    details = [_failures(one) for one in transitions if not all(one.proven.values())]
    return "\n".join([*parts, *details])


def _failures(one: Transition) -> str:
    failed = ", ".join(fix for fix, passes in one.proven.items() if not passes)
    return f"Carried to {one.release} by text, and failing its tests there: {failed}.\n"

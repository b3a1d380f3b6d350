"""Each release carried to as if it were new, from its neighbours, and what came out of that."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from packaging.version import Version

from scripts.carry.merge import CARRIED, Status
from scripts.carry.state import Result
from scripts.carry.trial import Trial, neighbours, start_of, try_all
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


@dataclass(frozen=True)
class Transition:
    """One release carried to: from where, what came out, and what the tests of it say.

    Attributes:
        release: The release.
        sources: The releases next to it that fixes come from, the preferred one first.
        alone: How many fixes each of them would carry by itself, by release.
        results: One for each fix.
        proven: For each fix whose carried form was tested, whether all of its tests passed.
    """

    release: str
    sources: tuple[str, ...]
    alone: dict[str, int]
    results: tuple[Result, ...]
    proven: dict[str, bool]


def _releases() -> list[str]:
    """Return the releases that have a neighbour to carry from."""
    carried = {*project().releases} & {*load_lock()}
    return [one for one in load_lock() if Version(one) >= _FIRST and carried - {one}]


def replay_all(proving: Collection[str]) -> list[Transition]:
    """Replay every transition; run the tests of what was carried to the releases `proving`.

    Raises:
        UnknownReleaseError: One of them is no release that is carried to.
    """
    releases = _releases()
    if unknown := [release for release in proving if release not in releases]:
        raise UnknownReleaseError(
            f"nothing is carried to {', '.join(unknown)}",
            expected=f"some of {', '.join(releases)}",
            next_step=f"nox -s replay -- --prove {releases[-1]}" if releases else "nox -s replay",
        )
    before = _proven_before()
    transitions = []
    for release in releases:
        err.print(f"{release} ...")
        transition, trial = replay(release)
        if release in proving:
            transition = replace(transition, proven=_run_carried(release, trial))
        else:
            transition = replace(transition, proven=before.get(_key(_row(transition)), {}))
        transitions.append(transition)
    return transitions


def write(transitions: Sequence[Transition]) -> None:
    """Write the record and the page."""
    replace_text(_RECORD, json.dumps([_row(one) for one in transitions], indent=1) + "\n")
    replace_text(_PAGE, as_markdown(transitions))


def replay(release: str) -> tuple[Transition, Trial]:
    """Carry the fixes of its neighbours to `release`, by text and by what is on record of stock."""
    registry, releases = load_registry(), upstream()
    series = [Target.of(one).series for one in neighbours(release)]
    known = [one.release for one in series]
    unknowing = Registry("", {fix.id: _as_of(fix, known) for fix in registry.fixes.values()})
    said = on_record(release, list(unknowing.fixes.values()))
    start = start_of(releases, series, release, unknowing, said)
    trial = try_all(releases, start.series, release, unknowing, said)
    sources = tuple(one.release for one in start.series)
    alone = {
        one: tried.carried for one, tried in zip(sources, start.trials or (trial,), strict=True)
    }
    return Transition(release, sources, alone, tuple(trial.results), {}), trial


def _as_of(fix: Fix, known: Collection[str]) -> Fix:
    """Return what is said of `fix` on the releases `known`: not where its defect ends."""
    spared = tuple(dict.fromkeys(test for one in known for test in fix.spared_on(one)))
    return replace(fix, applies_to=">=0", spared=(Spared(">=0", spared, ""),) if spared else ())


def _run_carried(release: str, trial: Trial) -> dict[str, bool]:
    """Run the tests of what was carried on the stock files with that, and nothing else."""
    registry = load_registry()
    carried = {one.fix: one.source for one in trial.results if one.status in CARRIED}
    fixes = [registry.fixes[one] for one in carried]
    environment = Environment(release).make()
    environment.install(environment.stock)
    patches = [
        patch
        for source in sorted({*carried.values()})
        for patch in Target.of(source).patches
        if carried.get(patch.fix_id) == source
    ]
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
        result.fix: {
            "status": result.status.value,
            "from": result.source,
            "stock": result.proof.value,
        }
        for result in one.results
    }
    return {
        "release": one.release,
        "from": list(one.sources),
        "alone": one.alone,
        "fixes": fates,
        "proven": one.proven,
    }


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
        "Each release, carried to as if it were new, from the nearest releases below and above it "
        "that have the fixes. Of the registry only what it says of those counts. *From* is where "
        "more hunks apply exactly; what has no patch there, or collides, comes from the other "
        "side, if it is carried from that. *Below* and *above*: what each would carry alone. *Left "
        "behind*: the stock release's own tests are on record as passing, so the fix is not "
        "carried. *Carried* is by text; *pass* says how many of them passed their tests on the "
        "result when these were last run (`--prove`), - that they were not. *Not needed*: carried, "
        "though the stock release is on record as not having the defect; that would be wrong. *A "
        "person*: it would have stopped there.\n",
        "| release | from | carried | below | above | by offsets | merged | pass | not needed "
        "| left behind | a person | stock on record |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    total: Counter[str] = Counter()
    for one in transitions:
        count = Counter(result.status for result in one.results)
        carried = [result for result in one.results if result.status in CARRIED]
        needless = sum(result.proof is Stock.PASSES for result in carried)
        person = sum(result.status.stops for result in one.results)
        recorded = sum(result.proof is not Stock.NOT_RUN for result in one.results)
        passed = sum(one.proven.values())
        shown = f"{passed} of {len(one.proven)}" if one.proven else "-"
        below, above = (_alone(one, older=older) for older in (True, False))
        parts.append(
            f"| {one.release} | {one.sources[0]} | {len(carried)} | {below} | {above} "
            f"| {count[Status.OFFSETS]} "
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
        f"\nOf {total['fixes']} times that a fix met a release, {total['carried']} "
        f"({_percent(total['carried'], total['fixes'])}) were carried without a hand, "
        f"{total['left']} were left behind by proof and {total['person']} need a person. "
        f"Of those carried, {total['tested']} were tested, and {total['passed']} passed. "
        "What is carried by text and fails its tests does not land: `nox -s rebase` tests it "
        "before it puts anything into place.\n"
    )
    details = [_failures(one) for one in transitions if not all(one.proven.values())]
    return "\n".join([*parts, *details])


def _alone(one: Transition, *, older: bool) -> str:
    """Return what the older, or the newer, neighbour would carry alone, and which that is."""
    number = Version(one.release)
    sides = (f"{n} from {r}" for r, n in one.alone.items() if (Version(r) < number) is older)
    return next(sides, "-")


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def _failures(one: Transition) -> str:
    failed = ", ".join(fix for fix, passes in one.proven.items() if not passes)
    return f"Carried to {one.release} by text, and failing its tests there: {failed}.\n"

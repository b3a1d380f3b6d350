"""Where each fix stands on each release, and how that is known."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from packaging.version import Version

from scripts.patchset import patch
from scripts.patchset.patch import Patch, apply_patches
from scripts.patchset.pins import load_pins
from scripts.patchset.registry import Fix, Registry
from scripts.patchset.series import Series, carried_releases, load_series
from scripts.project import REPORTS, ROOT
from scripts.prove.environment import Environment
from scripts.prove.forks import Fork
from scripts.prove.key import Side, inputs
from scripts.prove.outcomes import Outcome
from scripts.prove.pytest import Run, run_together
from scripts.prove.record import Proof, proofs, record
from scripts.prove.regressions import unlike_stock
from scripts.prove.starts import check_starts, starting
from scripts.prove.status_page import as_html, as_markdown
from scripts.prove.stock import Stock, judge
from scripts.system.console import err
from scripts.system.errors import (
    PatchDoesNotApplyError,
    RegistryError,
)
from scripts.system.files import replacing, sha256_once
from scripts.upstream.lock import load_lock
from scripts.upstream.tree import read_source
from scripts.wheel.build import patched_wheel

REPORT = REPORTS / "status.json"
PAGES = {ROOT / "docs" / "status.md": as_markdown, REPORTS / "status.html": as_html}


class State(str, Enum):
    """Where a fix stands on a release."""

    NOT_AFFECTED = "not affected"  # the release does not have the defect, nor had one before it
    PATCHED = "patched"
    UPSTREAM = "upstream since"  # an earlier release has the defect, this one does not
    OPEN = "open"  # affected, and without a patch
    UNPROVEN = "unproven"


HAVING = (State.OPEN, State.PATCHED)
"""The states of a release that has the defect, patched or not."""


@dataclass(frozen=True)
class Cell:
    """One fix on one release.

    Attributes:
        state: Where it stands.
        proven: Whether tests have shown it, with what went in unchanged; else it is a hint.
        why: What was seen, a sentence each.
        command: What showed it.
        runs: Whether `records/proofs/` has the runs that showed it.
        inputs: Hash of all that went in; the same hash, the same cell.
    """

    state: State
    proven: bool
    why: tuple[str, ...]
    command: str
    runs: bool
    inputs: str


def prove_missing(release: str, registry: Registry) -> None:
    """Run the tests of all fixes whose proof on `release` is missing or stale, and record them.

    Raises:
        CheckFailedError: A process of the patched build does not start.
    """
    recorded, series = proofs(release), _series_of(release)
    held = series.fix_ids if series else ()
    due: dict[Side, list[tuple[Fix, str]]] = {"stock": [], "patched": []}
    for fix in registry.fixes.values():
        for side, keys in due.items():
            proof = recorded.get((fix.id, side))
            key = (
                inputs(fix, release, side)
                if side == "stock" or fix.closed_by(release) in held
                else None
            )
            if key is not None and (proof is None or proof.inputs != key):
                keys.append((fix, key))
    if not any(due.values()):
        return
    environment = Environment(release)
    kept = environment.folder.is_dir()
    try:
        environment.make()
        environment.install(environment.stock)
        runs: dict[str, Run] = {}
        starts: list[Fork] = []
        for side, keys in due.items():
            if keys:
                err.print(f"{release}: {side}, the tests of {len(keys)} fixes ...")
                paths = sorted({test.partition("::")[0] for fix, _ in keys for test in fix.tests})
                patched = side == "patched"
                shadow = environment.beside(side, patched_wheel(release)) if patched else None
                runs[side] = Run(paths, shadow)
                if shadow:
                    starts = starting(shadow)
        outcomes, ended = run_together(environment, runs, *starts)
        check_starts(release, ended)
        for side, keys in due.items():
            if side in outcomes:
                record(release, side, keys, outcomes[side])
    finally:
        if not kept:
            shutil.rmtree(environment.folder, ignore_errors=True)


def all_cells(
    registry: Registry, previous: dict[str, dict[str, Cell]]
) -> dict[str, dict[str, Cell]]:
    """Return all cells: release, oldest first → fix → cell.

    Args:
        registry: The fixes.
        previous: Earlier cells, taken where nothing that went in has changed.
    """
    cells: dict[str, dict[str, Cell]] = {}
    affected: set[str] = set()
    for release in sorted(load_lock(), key=Version):
        row = release_cells(release, registry, previous.get(release, {}), affected)
        cells[release] = row
        affected.update(fix_id for fix_id, cell in row.items() if cell.state in HAVING)
    return cells


def release_cells(
    release: str,
    registry: Registry,
    previous: Mapping[str, Cell],
    affected: Collection[str] = (),
) -> dict[str, Cell]:
    """Return the cells of one release, by fix.

    Args:
        release: In its normal form.
        registry: The fixes.
        previous: Earlier cells of it, taken where nothing that went in has changed.
        affected: The fixes whose defect an earlier release has. It sets `UPSTREAM` apart from
            `NOT_AFFECTED`, and nothing else.
    """
    recorded, cells = proofs(release), {}
    for fix in registry.fixes.values():
        earlier = fix.id in affected
        cell = _proven(fix, release, recorded, earlier)
        if cell is None:
            key = _hint_inputs(fix, release, registry, earlier)
            known = previous.get(fix.id)
            cell = known if known and known.inputs == key else None
            cell = cell or _hint(fix, release, registry, earlier, key)
        cells[fix.id] = cell
    return cells


def _proven(
    fix: Fix, release: str, recorded: dict[tuple[str, Side], Proof], earlier: bool
) -> Cell | None:
    """Return what the recorded runs say; None where the stock release was not run."""
    stock, patched = recorded.get((fix.id, "stock")), recorded.get((fix.id, "patched"))
    if stock is None:
        return None
    series = _series_of(release)
    served = series is not None and fix.closed_by(release) in series.fix_ids
    has, why = _reading(fix, release, stock.outcomes)
    why = f"On the stock release {why}"
    current = _is_current(stock, fix, release, "stock")
    parts, used = [why], [stock.inputs]
    if has is None:
        state, current = State.UNPROVEN, False
    elif not has:
        state = State.UPSTREAM if earlier else State.NOT_AFFECTED
    elif not served:
        state = State.OPEN
        parts += _on_purpose(fix, release)
    elif patched is None:
        state, current = State.PATCHED, False
        parts.append("The patched release was not run.")
    else:
        still, why = _reading(fix, release, patched.outcomes)
        parts.append(f"On the patched release {why}")
        used.append(patched.inputs)
        state = State.UNPROVEN if still is not False else State.PATCHED
        current = current and still is False and _is_current(patched, fix, release, "patched")
    if not current and state is not State.UNPROVEN and has is not None:
        parts.append("Tests or patches have changed since, or not all sides were run.")
    # Where the registry denies the defect as a whole, `unexpected` of the session says so.
    known = state in HAVING and fix.affects(release)
    unlike = [*unlike_stock(fix.id, "stock", stock.outcomes, fix, release)] if known else []
    if unlike:
        current = False
        said = f"{len(unlike)} differences from what patches/fixes.toml says of the stock release"
        parts.append(f"{said}; one: {unlike[0]}")
    command = f"nox -s status -- --prove {release}"
    return Cell(state, current, tuple(parts), command, True, "+".join(used))


def _reading(fix: Fix, release: str, outcomes: dict[str, Outcome]) -> tuple[bool | None, str]:
    """Return whether these outcomes show the defect (None: they show nothing), and a sentence."""
    total = len(outcomes)
    passed = sum(one.result == "passed" for one in outcomes.values())
    said = judge(fix, release, outcomes)
    if said is Stock.PASSES:
        return False, f"all {total} tests pass."
    if said in (Stock.FAILS, Stock.MIXED):
        seen = next(one for one in outcomes.values() if one.is_assertion)
        count = f"{total - passed} of {total} tests fail"
        return True, f"{count}; one at {seen.place}: {seen.message}"
    others = [one for one in outcomes.values() if one.result != "passed"]
    if not others:
        return None, f"none of {', '.join(fix.tests)} ran."
    # What keeps a test from running says more than one that fails beside it.
    one = next((o for o in others if o.result != "failed"), others[0])
    lines = f"{one.place} {one.message}".strip().splitlines() or ["it says nothing"]
    count = f"{len(others)} of {total} tests could not run or show no behaviour"
    return None, f"{count}; one: {one.result}, {lines[-1]}"


def _is_current(proof: Proof | None, fix: Fix, release: str, side: Side) -> bool:
    return proof is not None and proof.inputs == inputs(fix, release, side)


def _hint(fix: Fix, release: str, registry: Registry, earlier: bool, key: str) -> Cell:
    """Return what the texts of the release and the registry say."""
    series, own = _nearest(fix, release)
    claimed = fix.affects(release)
    state = State.UNPROVEN
    if series is None:
        why = ["No release has a patch for it."]
    elif own and fix.closed_by(release) not in series.fix_ids:
        why = ["It has no patch there.", *_on_purpose(fix, release)]
        state = State.OPEN if fix.unpatched_on(release) else State.UNPROVEN
    else:
        try:
            apply_patches(_closing(fix, series, registry), lambda path: read_source(release, path))
        except (PatchDoesNotApplyError, RegistryError) as error:
            found = error.found.splitlines()[0]
            why = [f"The patch for {series.release} does not apply: {found}"]
        else:
            state = State.PATCHED if own else State.OPEN
            why = [f"The patch for {series.release} finds all its lines there, word for word."]
    if not claimed:
        why.append(f"The registry says that the defect is in {fix.applies_to} only.")
        contradiction = state is not State.UNPROVEN
        free = State.UPSTREAM if earlier else State.NOT_AFFECTED
        state = State.UNPROVEN if contradiction else free
    return Cell(state, False, tuple(why), "nox -s status", False, key)


def _closing(fix: Fix, series: Series, registry: Registry) -> tuple[Patch, ...]:
    return series.only([fix.closed_by(series.release) or fix.id], registry)


def _on_purpose(fix: Fix, release: str) -> list[str]:
    reason = fix.unpatched_on(release)
    return [f"It has no patch there on purpose: {reason}."] if reason else []


def _hint_inputs(fix: Fix, release: str, registry: Registry, earlier: bool) -> str:
    series, own = _nearest(fix, release)
    patches = () if series is None else _closing(fix, series, registry)
    parts = [
        load_lock()[release].sdist.sha256, fix.applies_to, fix.unpatched_on(release),
        str(own), str(earlier), _tools(),
        *(patch.diff for patch in patches),
    ]  # fmt: skip
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _nearest(fix: Fix, release: str) -> tuple[Series | None, bool]:
    """Return the series whose patch is asked, and whether it is the release's own.

    Else it is that of the nearest release below which has the fix, or above.
    """
    own = _series_of(release)
    if own is not None:
        return own, True
    having = [one for one in _carried() if fix.needed_on(one)]
    below = [one for one in having if Version(one) < Version(release)]
    nearest = below[-1] if below else (having[0] if having else None)
    return (None if nearest is None else _series(nearest)), False


def _series_of(release: str) -> Series | None:
    """Return the series of a release that is carried; None for one that is only pinned."""
    return _series(release) if release in _carried() else None


_carried = cache(carried_releases)
_series = cache(load_series)


@cache
def _tools() -> str:
    """Return a hash of the code that makes hints."""
    code = (Path(__file__), Path(patch.__file__))
    return "".join(map(sha256_once, code))


def previous_cells() -> dict[str, dict[str, Cell]]:
    """Return the cells of the last run; none where its report is of another form."""
    try:
        document = json.loads(REPORT.read_text(encoding="utf-8"))
        return {
            release: {fix_id: _cell(row) for fix_id, row in row_of.items()}
            for release, row_of in document.items()
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def _cell(row: dict[str, Any]) -> Cell:
    return Cell(**{**row, "state": State(row["state"]), "why": tuple(row["why"])})


def write(cells: dict[str, dict[str, Cell]], registry: Registry) -> None:
    """Write the report and the pages, each whole or not at all."""
    rows = {
        release: {fix_id: vars(cell) for fix_id, cell in row.items()}
        for release, row in cells.items()
    }
    pins = load_pins()
    texts = {path: make(rows, registry, pins) for path, make in PAGES.items()}
    texts[REPORT] = json.dumps(rows, indent=1) + "\n"
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(text.encode())

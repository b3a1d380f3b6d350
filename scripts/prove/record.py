"""What the tests have shown of each fix on each release, and of what exactly.

`reports/proofs/<release>.json` keeps, for each fix and side, the outcome of each test and a hash
of all that went into the run. A proof whose hash is not today's is stale: it says what was so.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from scripts.patchset.overlay import imported_modules, overlay_files
from scripts.patchset.registry import Fix
from scripts.patchset.series import load_series
from scripts.project import REPORTS, ROOT
from scripts.prove.outcomes import Outcome, is_of
from scripts.prove.pytest import PLUGIN
from scripts.system.files import replacing, sha256_once
from scripts.upstream.lock import load_lock

Side = Literal["stock", "patched"]
FOLDER = REPORTS / "proofs"


@dataclass(frozen=True)
class Proof:
    """The outcomes of a fix's tests by node id, and the hash of what went into the run."""

    inputs: str
    outcomes: dict[str, Outcome]


def inputs(fix: Fix, release: str, side: Side) -> str:
    """Return a hash of the release, the patches and the tests that decide what a run says.

    It is the same on every machine: the release goes in by its sdist, not by one of its wheels.
    """
    parts = [load_lock()[release].sdist.sha256, *map(sha256_once, _test_files(fix.tests))]
    parts += fix.left_open_on(release)
    if side == "patched":
        parts.append(_patch_set(release))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def tests_hash(fix: Fix) -> str:
    """Return a hash of the tests of `fix` and of all below tests/ that they import."""
    digests = map(sha256_once, _test_files(fix.tests))
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


def proofs(release: str) -> dict[tuple[str, Side], Proof]:
    """Return what is recorded of `release`, by fix and side."""
    path = FOLDER / f"{release}.json"
    if not path.is_file():
        return {}
    document = json.loads(path.read_text(encoding="utf-8"))
    return {
        (fix, side): Proof(
            entry["inputs"], {node: Outcome(**row) for node, row in entry["outcomes"].items()}
        )
        for fix, sides in document.items()
        for side, entry in sides.items()
    }


def record(
    release: str, side: Side, keys: Sequence[tuple[Fix, str]], outcomes: Mapping[str, Outcome]
) -> None:
    """Keep what a run on one side of `release` says; what is recorded of other fixes stays.

    Args:
        release: The release.
        side: What was installed.
        keys: The fixes, each with the hash of what went in, taken before the run.
        outcomes: What became of each test, by node id.
    """
    path = FOLDER / f"{release}.json"
    document = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    for fix, key in keys:
        own = {node: asdict(one) for node, one in of_fix(fix, release, outcomes).items()}
        document.setdefault(fix.id, {})[side] = {"inputs": key, "outcomes": own}
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write((json.dumps(document, indent=1, sort_keys=True) + "\n").encode())


def of_fix(fix: Fix, release: str, outcomes: Mapping[str, Outcome]) -> dict[str, Outcome]:
    """Return the outcomes, by node id, of the tests of `fix` that say something of `release`."""
    left_open = fix.left_open_on(release)
    return {
        node: outcome
        for node, outcome in outcomes.items()
        if any(is_of(node, test) for test in fix.tests)
        and not any(is_of(node, test) for test in left_open)
    }


@cache
def _test_files(tests: tuple[str, ...]) -> tuple[Path, ...]:
    """Return the files of `tests` and all modules below tests/ that they import."""
    pending = [ROOT / test.partition("::")[0] for test in tests]
    pending.append(ROOT.joinpath(*PLUGIN.split(".")).with_suffix(".py"))
    found: set[Path] = set()
    while pending:
        path = pending.pop()
        if path not in found and path.is_file():
            found.add(path)
            modules = imported_modules(ast.parse(path.read_bytes()))
            pending += [
                ROOT.joinpath(*m.split(".")).with_suffix(".py")
                for m in modules
                if m.startswith("tests.")
            ]
    return tuple(sorted(found))


@cache
def _patch_set(release: str) -> str:
    """Return a hash of all that is added to a release: patches and overlay."""
    series = load_series(release)
    digest = hashlib.sha256()
    for patch in series.patches:
        digest.update(patch.diff.encode())
    for name, data in sorted(overlay_files(series.patches).items()):
        digest.update(name.encode() + b"\0" + data)
    return digest.hexdigest()

"""What the tests have shown of each fix on each release, and of what exactly.

`records/proofs/<release>.json` keeps, for each fix and side, the outcome of each test and the key
of the run (`scripts.prove.key`); of a fix alone it keeps less (`scripts.prove.alone`). A proof
whose key is not today's is stale: it says what was so. What chance or the machine puts into a
message is left out: the same run writes the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

from scripts.patchset.registry import Fix
from scripts.project import RECORDS
from scripts.prove.chance import without_chance
from scripts.prove.key import Side
from scripts.prove.outcomes import Outcome, is_of
from scripts.system.files import read_json, replacing

FOLDER = RECORDS / "proofs"
_SIDES: tuple[Side, ...] = get_args(Side)


@dataclass(frozen=True)
class Proof:
    """The outcomes of a fix's tests by node id, and the key of the run."""

    inputs: str
    outcomes: dict[str, Outcome]


def proofs(release: str) -> dict[tuple[str, Side], Proof]:
    """Return what is recorded of `release`, by fix and side."""
    return {
        (fix, side): Proof(
            entry["inputs"], {node: Outcome(**row) for node, row in entry["outcomes"].items()}
        )
        for fix, sides in document_of(release).items()
        for side in _SIDES
        if (entry := sides.get(side))
    }


def record(
    release: str, side: Side, keys: Sequence[tuple[Fix, str]], outcomes: Mapping[str, Outcome]
) -> None:
    """Keep what a run on one side of `release` says; what is recorded of other fixes stays.

    Args:
        release: The release.
        side: What was installed.
        keys: The fixes, each with the key of the run, taken before it.
        outcomes: What became of each test, by node id.
    """
    document = document_of(release)
    for fix, key in keys:
        own = {
            node: asdict(without_chance(one))
            for node, one in of_fix(fix, release, outcomes).items()
        }
        document.setdefault(fix.id, {})[side] = {"inputs": key, "outcomes": own}
    keep(release, document)


def document_of(release: str) -> dict[str, dict[str, Any]]:
    """Return all that is recorded of `release` as it is stored: fix → side → entry.

    Raises:
        UsageError: It is no JSON, as after a merge that nobody finished.
    """
    path = FOLDER / f"{release}.json"
    again = f"git checkout {path}; or remove it, then: nox -s status -- --prove {release}"
    return read_json(path, next_step=again) if path.is_file() else {}


def keep(release: str, document: dict[str, dict[str, Any]]) -> None:
    """Store all that is recorded of `release`."""
    path = FOLDER / f"{release}.json"
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

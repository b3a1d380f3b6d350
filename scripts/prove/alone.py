"""What each fix did alone, on record: a session runs it again only where its key does not hold.

`records/proofs/<release>.json` keeps it beside the fix's other sides: the key of the run, and which
tests passed; all others failed. Only a run without a fault is put there, so that there was no third
thing, and only one of the tests of all fixes. The verdict is made anew each time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from scripts.patchset.registry import Registry
from scripts.patchset.series import load_series
from scripts.prove.key import inputs_alone
from scripts.prove.outcomes import Outcome, Outcomes, is_of
from scripts.prove.record import document_of, keep

SIDE = "alone"


@dataclass(frozen=True)
class Alone:
    """What a fix did alone.

    Attributes:
        inputs: The key of the run.
        passed: The tests that passed; a file or a function stands for all of its tests.
    """

    inputs: str
    passed: tuple[str, ...]

    def outcomes(self, nodes: Iterable[str]) -> Outcomes:
        """Return what became of the tests `nodes`, of which there were no others in that run."""
        return {
            node: Outcome("passed" if any(is_of(node, one) for one in self.passed) else "failed")
            for node in nodes
        }


def keys_alone(release: str, registry: Registry) -> dict[str, str]:
    """Return today's key of each fix alone, by fix, for the tests of all that concern `release`."""
    fixes = [fix for fix in registry.fixes.values() if fix.closed_by(release)]
    series = load_series(release, registry)
    return {
        one: inputs_alone(release, series.only([one], registry), fixes)
        for one in sorted({fix.closed_by(release) for fix in fixes} & {*series.fix_ids})
    }


def held(release: str, keys: Mapping[str, str]) -> dict[str, Alone]:
    """Return, by fix, what is on record under the key that `keys` has for it."""
    found = {}
    for fix_id, sides in document_of(release).items():
        entry = sides.get(SIDE)
        if entry is not None and entry["inputs"] == keys.get(fix_id):
            found[fix_id] = Alone(entry["inputs"], tuple(entry["passed"]))
    return found


def record_alone(release: str, sides: Mapping[str, Alone | None]) -> None:
    """Keep what fixes did alone; of one with None, nothing is kept."""
    document = document_of(release)
    for fix_id, side in sides.items():
        if side is not None:
            document.setdefault(fix_id, {})[SIDE] = asdict(side)
        else:
            document.get(fix_id, {}).pop(SIDE, None)
    keep(release, document)


def passed(outcomes: Outcomes) -> tuple[str, ...]:
    """Return which tests passed, by as few names as can say it."""
    names = set()
    for node, outcome in outcomes.items():
        if outcome.result == "passed":
            wider = (node.partition("::")[0], node.partition("[")[0])
            names.add(next((name for name in wider if _all_passed(name, outcomes)), node))
    return tuple(sorted(names))


def _all_passed(name: str, outcomes: Outcomes) -> bool:
    return all(o.result == "passed" for node, o in outcomes.items() if is_of(node, name))

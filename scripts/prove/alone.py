"""What each fix did alone, on record: a session runs it again only where its key does not hold.

`records/proofs/<release>.json` keeps it beside the fix's other sides: the key of the run for each
fix whose tests were run, and which tests passed; all others failed. So a new fix costs a run of its
own tests beside each other one, and not of all. Only runs without a fault are put there, so that
there was no third thing, and only of the tests of all fixes. The verdict is made anew each time.
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
        inputs: By each fix whose tests were run, the key of their run.
        passed: The tests that passed; a file or a function stands for all of its tests.
    """

    inputs: Mapping[str, str]
    passed: tuple[str, ...]

    def outcomes(self, nodes: Iterable[str]) -> Outcomes:
        """Return what became of the tests `nodes`, of which there were no others in that run."""
        return {
            node: Outcome("passed" if any(is_of(node, one) for one in self.passed) else "failed")
            for node in nodes
        }


def keys_alone(release: str, registry: Registry) -> dict[str, dict[str, str]]:
    """Return, by fix, today's key of it alone for the tests of each fix that concerns `release`."""
    fixes = [fix for fix in registry.fixes.values() if fix.closed_by(release)]
    affecting = [fix for fix in fixes if fix.affects(release)]
    series = load_series(release, registry)
    return {
        one: inputs_alone(affecting, release, series.only([one], registry))
        for one in sorted({fix.closed_by(release) for fix in fixes} & {*series.fix_ids})
    }


def held(release: str, keys: Mapping[str, Mapping[str, str]]) -> dict[str, Alone]:
    """Return, by fix, what is on record of it alone under a key that `keys` has."""
    found = {}
    for fix_id, sides in document_of(release).items():
        if SIDE in sides and fix_id in keys:
            inputs = dict(sides[SIDE]["inputs"].items() & keys[fix_id].items())
            found[fix_id] = Alone(inputs, tuple(sides[SIDE]["passed"]))
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

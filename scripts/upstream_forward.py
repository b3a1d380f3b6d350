"""Tests that later releases brought for our fixes, on stock and on patched: what they have to say.

`scripts.forward_tests` cuts them out of the later release and knows what each has to do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from scripts.forward_tests import ForwardTest, owner
from scripts.prove.outcomes import Outcome
from scripts.upstream_compare import said

Sides = Mapping[str, Mapping[str, Outcome]]
_ABSENT = Outcome("absent")


def verdicts(listed: dict[str, ForwardTest], outcomes: Sides) -> dict[str, dict[str, str]]:
    """Return for each test that ran where it comes from and what came of it on each side."""
    found: dict[str, dict[str, str]] = {}
    for node in sorted({node for of_side in outcomes.values() for node in of_side}):
        one = owner(node, listed)
        if one is None:
            continue
        results = {side: of_side.get(node, _ABSENT) for side, of_side in outcomes.items()}
        found[node] = {
            "fix": one.fix,
            "from": one.release,
            "test": one.test,
            **({} if one.discriminates else {"does not discriminate": one.reason}),
            **{side: outcome.result for side, outcome in results.items()},
        }
        bad = [outcome for outcome in results.values() if outcome.result in ("failed", "error")]
        if bad:
            found[node]["said"] = said(bad[0])
    return found


def faults(listed: dict[str, ForwardTest], outcomes: Sides, *, whole: bool) -> Iterator[str]:
    """Yield what a test of a later release should have done on one of the sides, and did not.

    Args:
        listed: The tests of later releases.
        outcomes: By side, "stock" and "patched", and node id.
        whole: Whether all of them were to run.
    """
    stock, patched = outcomes["stock"], outcomes["patched"]
    ran = {node: owner(node, listed) for node in sorted(stock.keys() | patched.keys())}
    for node, one in ran.items():
        if one is not None:
            fault = one.fault(stock.get(node, _ABSENT), patched.get(node, _ABSENT))
            if fault:
                yield f"{one.fix}: {node} (of {one.release}) {fault}"
    for node, one in listed.items() if whole else ():
        if not any(other == node or other.partition("[")[0] == node for other in ran):
            yield f"{one.fix}: {node} (of {one.release}) did not run"

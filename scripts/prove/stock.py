"""What a stock release says of the fixes: their regression tests, run on it.

This is the proof of "already upstream". That a text looks alike is a hint; that the defect's own
tests pass on the stock wheel shows that the release does not have it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum

from scripts.patchset.registry import Fix
from scripts.prove.environment import Environment, give_back
from scripts.prove.key import inputs
from scripts.prove.outcomes import Outcome, is_of
from scripts.prove.pytest import run_pytest
from scripts.prove.record import proofs, record
from scripts.system.console import err


class Stock(Enum):
    """What the tests of one fix say of a stock release."""

    PASSES = "its tests pass on stock"
    FAILS = "its tests fail on stock"
    MIXED = "some of its tests pass on stock"
    UNKNOWN = "its tests cannot tell"
    NOT_RUN = "not tested"


def ask_stock(release: str, fixes: Sequence[Fix]) -> dict[str, Stock]:
    """Return what the tests of each fix say of the stock wheel of `release`.

    What is on record for the same tests counts; the others run, and go on record.

    Raises:
        CommandError: The environment cannot be made.
        NotLockedError: No wheel of the release is pinned for this machine.
    """
    said = on_record(release, fixes)
    due = [fix for fix in fixes if said[fix.id] is Stock.NOT_RUN]
    if due:
        keys = [(fix, inputs(fix, release, "stock")) for fix in due]
        environment = Environment(release).make()
        environment.install(environment.stock)
        err.print(f"{release}: the tests of {len(due)} fixes on stock ...")
        paths = sorted({test.partition("::")[0] for fix in due for test in fix.tests})
        record(release, "stock", keys, run_pytest(environment, paths))
        give_back()  # `nox -s rebase` runs others that take it
        said = on_record(release, fixes)
    return said


def on_record(release: str, fixes: Sequence[Fix]) -> dict[str, Stock]:
    """Return what is on record for today's tests of each fix; no test runs."""
    recorded = proofs(release)
    said = dict.fromkeys((fix.id for fix in fixes), Stock.NOT_RUN)
    for fix in fixes:
        proof = recorded.get((fix.id, "stock"))
        if proof is not None and proof.inputs == inputs(fix, release, "stock"):
            said[fix.id] = judge(fix, release, proof.outcomes)
    return said


def judge(fix: Fix, release: str, outcomes: Mapping[str, Outcome]) -> Stock:
    """Return what the outcomes of the tests of `fix`, by node id, say of `release`.

    Where a test errors (its harness broke down) or is skipped, or none fails by an assertion of
    its own file, they say nothing: an interface may have moved. Tests that the registry spares on
    an affected release have to pass there, and say no more.
    """
    spared = fix.spared_on(release) if fix.affects(release) else ()
    own = [
        outcome
        for node, outcome in outcomes.items()
        if not (outcome.result == "passed" and any(is_of(node, test) for test in spared))
    ]
    results = {outcome.result for outcome in own}
    if results == {"passed"}:
        return Stock.PASSES
    if not any(outcome.is_assertion for outcome in own) or not results <= {"passed", "failed"}:
        return Stock.UNKNOWN
    return Stock.MIXED if "passed" in results else Stock.FAILS

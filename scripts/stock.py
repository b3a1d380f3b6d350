"""What a stock release says of the fixes: their regression tests, run on it.

This is the proof of "already upstream". That a text looks alike is a hint; that the defect's own
tests pass on the stock wheel shows that the release does not have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from scripts.environment import Environment
from scripts.fixes import Fix
from scripts.pytest_run import Outcome, run_pytest
from scripts.regressions import of_fix
from scripts.terminal import err


class Stock(Enum):
    """What the tests of one fix say of a stock release."""

    PASSES = "its tests pass on stock"
    FAILS = "its tests fail on stock"
    MIXED = "some of its tests pass on stock"
    UNKNOWN = "its tests cannot tell"
    NOT_RUN = "not tested"


def ask_stock(release: str, fixes: Sequence[Fix]) -> dict[str, Stock]:
    """Run the tests of `fixes` on the stock wheel of `release`; return what each says.

    Raises:
        CommandError: The environment cannot be made.
        NotLockedError: No wheel of the release is pinned for this machine.
    """
    environment = Environment(release).make()
    environment.install(environment.stock)
    err.print(f"{release}: the tests of {len(fixes)} fixes on stock ...")
    paths = sorted({test.partition("::")[0] for fix in fixes for test in fix.tests})
    outcomes = run_pytest(environment, paths)
    return {fix.id: verdict(fix, outcomes) for fix in fixes}


def verdict(fix: Fix, outcomes: dict[str, Outcome]) -> Stock:
    """Return what `outcomes`, by node id, say of `fix`.

    A test that errors, is skipped, or fails where none of its own assertions does, says nothing:
    an interface may have moved.
    """
    own = of_fix(fix, outcomes).values()
    results = {outcome.result for outcome in own}
    if results == {"passed"}:
        return Stock.PASSES
    if not any(outcome.is_assertion for outcome in own) or not results <= {"passed", "failed"}:
        return Stock.UNKNOWN
    return Stock.MIXED if "passed" in results else Stock.FAILS

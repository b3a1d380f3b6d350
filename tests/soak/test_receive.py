"""The state machine of `tests.support.receive_machine`, long, on both sides (`nox -s soak`)."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.support.receive_machine import BrokenClaimError, Fault, explore

STEPS = 100_000
REFUSALS: tuple[Fault, ...] = ("posting",)

pytestmark = pytest.mark.timeout(5400)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """A hundred thousand expected failures need not be formatted."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_the_patched_worker_keeps_every_promise() -> None:
    steps = explore(STEPS)
    print(f"{steps} steps")
    assert steps >= STEPS


def test_the_machine_finds_the_race_of_the_stock_worker() -> None:
    # It reports a receive while another rank's read is in flight, and dies when that one ends.
    error = r"in flight|not found in recving_metadata"
    with pytest.raises(BrokenClaimError, match=error) as found:
        explore(STEPS, faults=REFUSALS, claims=("lives", "once"), shrink=False)
    print(str(found.value).splitlines()[0])

"""10,000 hostile clients, handshakes and notifications, on both sides (`nox -s soak`)."""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Iterator

import pytest

from tests.support.hostile_visits import KINDS

CASES = 10_000
MEMORY = 14 << 30
"""Bytes, of addresses."""

SEED = os.environ.get("KVFIX_SEED", "0")

pytestmark = [
    pytest.mark.timeout(5400),
    # Threads that end so are what this is about.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
]


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    """A release that makes a list as long as a client says does not get this machine's memory."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("kind", KINDS)
def test_the_stock_release_ends(kind: str) -> None:
    came = KINDS[kind](SEED, CASES)
    print(f"\nstock, {kind}: {came}")
    assert came.died


@pytest.mark.parametrize("kind", KINDS)
def test_the_patched_release_keeps_every_rule(kind: str) -> None:
    came = KINDS[kind](SEED, CASES)
    print(f"\npatched, {kind}: {came}")
    assert not came.broken(), came.faults
    assert came.cases == CASES

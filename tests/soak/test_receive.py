"""The state machine of `tests/overlay` for a receive, run for long."""

from __future__ import annotations

import logging

import pytest

from tests.receive_machine import explore

STEPS = 100_000


@pytest.mark.timeout(3600)
def test_the_machine_finds_nothing() -> None:
    logging.disable(logging.CRITICAL)  # hundreds of thousands of expected failures
    try:
        assert explore(STEPS) >= STEPS
    finally:
        logging.disable(logging.NOTSET)

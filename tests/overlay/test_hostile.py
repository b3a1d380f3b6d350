"""Some hundred hostile clients and peers; `nox -s soak` sends ten thousand of each kind."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.support.hostile_visits import KINDS

CASES = 400


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_dies_and_an_honest_one_is_served(kind: str) -> None:
    came = KINDS[kind]("a short run", CASES)
    assert not came.broken(), came
    assert came.cases == CASES

"""What every test of the overlay begins with: nothing counted, and nothing logged of late."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from tests.support.reaching import reaching_peers
from vllm_overlay.distributed.kv_transfer import fix_counts
from vllm_overlay.logging_utils import bounded_log

_tests = itertools.count(1)


@pytest.fixture(autouse=True)
def _nothing_counted() -> Iterator[None]:
    # A metric of an earlier test would take what is counted for as long as it is not collected.
    fix_counts._begin()
    yield
    fix_counts._begin()


@pytest.fixture(autouse=True)
def _peers_are_there() -> Iterator[None]:
    with reaching_peers():
        yield


@pytest.fixture(autouse=True)
def _nothing_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    # Lines are bounded by the minute, and how many tests a minute has, no test knows.
    later = next(_tests) * bounded_log.PERIOD
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + later)
    monkeypatch.setattr(bounded_log, "time", clock)

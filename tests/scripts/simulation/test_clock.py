"""Each place reads its own clock, and only the history moves them."""

from __future__ import annotations

import sys
import time
from types import ModuleType

import pytest

from tests.simulation.clock import WALL, Clock, Place, VirtualTime, replacing, virtual_time


def test_places_have_origins_of_their_own() -> None:
    clock = Clock()
    clock.origins = {Place("P"): 100.0, Place("P", 1): 5000.0}
    stand_in = VirtualTime(clock)
    clock.now = 3.0
    with clock.at(Place("P")):
        assert stand_in.perf_counter() == stand_in.monotonic() == 103.0
        with clock.at(Place("P", 1)):
            assert stand_in.monotonic() == 5003.0
        assert stand_in.monotonic_ns() == 103 * 10**9
    assert stand_in.monotonic() == 3.0
    assert stand_in.time() == WALL + 3.0


def test_sleeping_takes_no_time() -> None:
    clock = Clock()
    VirtualTime(clock).sleep(60.0)
    assert clock.now == 0.0


def test_modules_of_a_package_get_it_and_have_their_own_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inside, other, outside = (ModuleType(name) for name in ("toy.a", "toy.b", "toys.c"))
    vars(inside)["time"] = vars(outside)["time"] = time
    vars(other)["time"] = "its own"
    for module in (inside, other, outside):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    clock = Clock()
    with replacing({"time": virtual_time(clock)}, ("toy.",)):
        assert vars(inside)["time"].monotonic() == 0.0
        assert vars(other)["time"] == "its own"
        assert vars(outside)["time"] is time
    assert vars(inside)["time"] is time

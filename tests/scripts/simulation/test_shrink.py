"""What is left of a history shows it, and no event of it can be left out."""

from __future__ import annotations

import pytest

from tests.simulation.shrink import shrink


@pytest.mark.parametrize("needed", [{3}, {0, 99}, {10, 11, 12}, {1, 40, 41, 77, 98}, set()])
def test_only_what_is_needed_stays(needed: set[int]) -> None:
    assert shrink(range(100), lambda kept: needed <= set(kept)) == sorted(needed)


def test_one_of_two_ways_is_enough() -> None:
    kept = shrink(range(20), lambda kept: {1, 2} <= set(kept) or 15 in kept)
    assert kept in ([15], [1, 2])


def test_it_stops_asking() -> None:
    asked: list[int] = []

    def shows(kept: list[int]) -> bool:
        asked.append(len(kept))
        return set(range(0, 100, 2)) <= set(kept)

    kept = shrink(range(100), shows, tries=30)
    assert len(asked) == 30
    assert set(range(0, 100, 2)) <= set(kept)

from __future__ import annotations

import pytest

from scripts.prove.outcomes import Outcome
from scripts.upstream_tests.later import ForwardTest, outcome_faults, results_by_test

PASSED = Outcome("passed")
FAILED = Outcome("failed", "tests/a.py:3", "AssertionError: wrong blocks")
OTHERWISE = Outcome("failed", "tests/a.py:1", "TypeError: no such argument")
TELLING = ForwardTest("42097", "0.22.0", "tests/x.py::one", True, "AssertionError: wrong")
QUIET = ForwardTest("K02", "0.30.0", "tests/x.py::two", False, "only calls what is there")
LISTED = {"tests/a.py::one[x]": TELLING, "tests/a.py::two": QUIET}


def test_each_outcome_has_its_origin() -> None:
    outcomes = {
        "stock": {
            "tests/a.py::one[x]": FAILED,
            "tests/a.py::two[1]": PASSED,
            "tests/b.py::own": FAILED,
        },
        "patched": {"tests/a.py::one[x]": PASSED},
    }
    found = results_by_test(LISTED, outcomes)
    assert found == {
        "tests/a.py::one[x]": {
            "fix": "42097",
            "from": "0.22.0",
            "test": "tests/x.py::one",
            "stock": "failed",
            "patched": "passed",
            "said": "AssertionError: wrong blocks",
        },
        "tests/a.py::two[1]": {
            "fix": "K02",
            "from": "0.30.0",
            "test": "tests/x.py::two",
            "does not discriminate": "only calls what is there",
            "stock": "passed",
            "patched": "absent",
        },
    }


@pytest.mark.parametrize(
    ("one", "two", "said"),
    [
        ((FAILED, PASSED), (PASSED, PASSED), ""),
        ((PASSED, PASSED), (PASSED, PASSED), "passed on stock, so it proves nothing"),
        ((OTHERWISE, PASSED), (PASSED, PASSED), "fails on stock otherwise than with"),
        ((FAILED, FAILED), (PASSED, PASSED), "failed on patched: AssertionError: wrong blocks"),
        ((FAILED, None), (PASSED, PASSED), "absent on patched"),
        ((FAILED, PASSED), (FAILED, PASSED), "where the registry says that it passes"),
        ((FAILED, PASSED), (None, None), "tests/a.py::two (of 0.30.0) did not run"),
    ],
)
def test_a_later_test_has_to_do_what_is_listed(
    one: tuple[Outcome | None, ...], two: tuple[Outcome | None, ...], said: str
) -> None:
    outcomes: dict[str, dict[str, Outcome]] = {"stock": {}, "patched": {}}
    for node, results in (("tests/a.py::one[x]", one), ("tests/a.py::two", two)):
        for side, result in zip(outcomes, results, strict=True):
            if result is not None:
                outcomes[side][node] = result
    found = list(outcome_faults(LISTED, outcomes, whole=True))
    assert len(found) == bool(said)
    assert all(said in fault for fault in found)
    unlisted = {side: {**of_side, "tests/b.py::x": FAILED} for side, of_side in outcomes.items()}
    assert list(outcome_faults(LISTED, unlisted, whole=True)) == found


def test_of_a_part_a_later_test_may_be_missing() -> None:
    assert list(outcome_faults(LISTED, {"stock": {}, "patched": {}}, whole=False)) == []
    assert len(list(outcome_faults(LISTED, {"stock": {}, "patched": {}}, whole=True))) == 2

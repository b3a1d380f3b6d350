from __future__ import annotations

import pytest

from scripts.patchset.registry import Spared
from scripts.prove.outcomes import Outcome
from scripts.prove.stock import Stock, judge
from tests.scripts import toys

PASSED = Outcome("passed")
FAILED = Outcome("failed", "tests/a.py:1", "assert 1 == 2", "test")
RAISED = Outcome("failed", "vllm/a.py:1", "AttributeError: moved", "release")
ERROR = Outcome("error", "tests/a.py:1", "ImportError: moved", "harness")


@pytest.mark.parametrize(
    ("outcomes", "said"),
    [
        ([PASSED, PASSED], Stock.PASSES),
        ([FAILED, FAILED], Stock.FAILS),
        ([FAILED, RAISED], Stock.FAILS),
        ([PASSED, FAILED], Stock.MIXED),
        ([RAISED, RAISED], Stock.UNKNOWN),
        ([PASSED, RAISED], Stock.UNKNOWN),
        ([PASSED, ERROR], Stock.UNKNOWN),
        ([FAILED, ERROR], Stock.UNKNOWN),
        ([PASSED, Outcome("skipped")], Stock.UNKNOWN),
        ([], Stock.UNKNOWN),
    ],
)
def test_only_tests_that_ran_to_their_end_say_something(
    outcomes: list[Outcome], said: Stock
) -> None:
    named = {f"tests/a.py::test_{n}": outcome for n, outcome in enumerate(outcomes)}
    assert judge(toys.fix("1"), "0.20.2", named) is said


def test_what_the_registry_spares_has_to_pass_and_says_no_more() -> None:
    spared = Spared(releases=">=0.22", tests=("tests/a.py::test_0",), reason="upstream has it")
    fix = toys.fix("1", applies_to=">=0.20", spared=(spared,))
    part = {"tests/a.py::test_0[x]": PASSED, "tests/a.py::test_1": FAILED}
    assert judge(fix, "0.22.0", part) is Stock.FAILS
    assert judge(fix, "0.21.0", part) is Stock.MIXED
    other = {"tests/a.py::test_0[x]": RAISED, "tests/a.py::test_1": FAILED}
    assert judge(fix, "0.22.0", other) is Stock.FAILS
    everything = dict.fromkeys(part, PASSED)
    assert judge(fix, "0.22.0", everything) is Stock.PASSES

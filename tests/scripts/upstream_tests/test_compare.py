from __future__ import annotations

import pytest

from scripts.patchset.registry import UpstreamTest
from scripts.prove.outcomes import Outcome
from scripts.upstream_tests.compare import Change, compare, faults, named, reason, said, settle
from tests.scripts import toys

PASSED, SKIPPED = Outcome("passed"), Outcome("skipped", "", "why")
FAILED, ERROR = Outcome("failed", "tests/a.py:1", "assert 0"), Outcome("error", "", "OSError: x")


@pytest.mark.parametrize(
    ("stock", "patched", "change"),
    [
        (PASSED, PASSED, Change.STILL_PASSING),
        (PASSED, FAILED, Change.NEWLY_FAILING),
        (PASSED, ERROR, Change.NEWLY_FAILING),
        (PASSED, SKIPPED, Change.VANISHED),
        (PASSED, None, Change.VANISHED),
        (FAILED, PASSED, Change.NEWLY_PASSING),
        (ERROR, PASSED, Change.NEWLY_PASSING),
        (FAILED, ERROR, Change.FAILING_IN_BOTH),
        (FAILED, SKIPPED, Change.VANISHED),
        (FAILED, None, Change.VANISHED),
        (SKIPPED, PASSED, Change.APPEARED),
        (SKIPPED, FAILED, Change.NEWLY_FAILING),
        (SKIPPED, SKIPPED, Change.SKIPPED_IN_BOTH),
        (SKIPPED, None, Change.SKIPPED_IN_BOTH),
        (None, PASSED, Change.APPEARED),
        (None, FAILED, Change.NEWLY_FAILING),
        (None, SKIPPED, Change.SKIPPED_IN_BOTH),
    ],
)
def test_what_becomes_of_a_test(
    stock: Outcome | None, patched: Outcome | None, change: Change
) -> None:
    sides = [{"t": one} if one else {} for one in (stock, patched)]
    assert compare(*sides) == {"t": change}


@pytest.mark.parametrize(
    ("first", "stock", "patched", "final"),
    [
        (Change.NEWLY_FAILING, "pppp", "ffff", Change.NEWLY_FAILING),
        (Change.NEWLY_FAILING, "pppp", "pfpp", Change.NEWLY_FAILING),
        (Change.NEWLY_FAILING, "pppp", "pppf", Change.NEWLY_FAILING),
        (Change.NEWLY_FAILING, "pppp", "pppp", Change.FLAKY),
        (Change.NEWLY_FAILING, "pfpp", "ffff", Change.FLAKY),
        (Change.NEWLY_PASSING, "ffff", "pppp", Change.NEWLY_PASSING),
        (Change.NEWLY_PASSING, "ffpf", "pppp", Change.FLAKY),
        (Change.NEWLY_PASSING, "ffff", "pppf", Change.FLAKY),
    ],
)
def test_a_difference_is_settled_by_later_runs(
    first: Change, stock: str, patched: str, final: Change
) -> None:
    letters = {"p": PASSED, "f": FAILED}
    of_stock, of_patched = (
        [{"t": letters[letter]} for letter in side] for side in (stock, patched)
    )
    assert settle(first, of_stock, of_patched, "t") is final


def test_the_registry_names_tests_by_release_and_fix() -> None:
    one = UpstreamTest("<=0.20.2", "tests/a.py::test", "it expects the defect")
    fixes = [toys.fix("1", upstream_tests=(one,)), toys.fix("2", upstream_tests=(one,))]
    assert named(fixes, "0.20.2", ["1"]) == {"tests/a.py::test": "1: it expects the defect"}
    assert named(fixes, "0.21.0", ["1", "2"]) == {}
    assert named(fixes, "0.20.2", []) == {}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"a::n[1]": Change.NEWLY_FAILING, "a::n[2]": Change.STILL_PASSING}, []),
        ({"a::n": Change.NEWLY_FAILING, "a::x": Change.NEWLY_FAILING}, ["a::x passes on stock"]),
        ({"a::n": Change.NEWLY_FAILING, "a::nx": Change.NEWLY_FAILING}, ["a::nx passes on stock"]),
        ({"a::n": Change.NEWLY_FAILING, "a::x": Change.VANISHED}, ["a::x runs on stock"]),
        ({"a::n": Change.NEWLY_FAILING, "a::x": Change.FLAKY}, []),
        ({"a::n": Change.NEWLY_FAILING, "a::x": Change.APPEARED}, []),
        ({"a::n": Change.STILL_PASSING}, ["a::n is named in fixes.toml as failing"]),
        ({"a::n": Change.FAILING_IN_BOTH}, ["a::n is named in fixes.toml as failing"]),
        ({"a::x": Change.STILL_PASSING}, ["a::n is named in fixes.toml and did not run"]),
    ],
)
def test_what_must_not_be(changes: dict[str, Change], expected: list[str]) -> None:
    found = list(faults(changes, ["a::n"], whole=True))
    assert len(found) == len(expected)
    assert all(fault.startswith(start) for fault, start in zip(found, expected, strict=True))


def test_of_a_part_a_named_test_may_be_missing() -> None:
    assert list(faults({"a::x": Change.STILL_PASSING}, ["a::n"], whole=False)) == []


@pytest.mark.parametrize(
    ("message", "name"),
    [
        ("RuntimeError: Found no NVIDIA driver on your system.", "GPU driver"),
        ("ImportError: libcuda.so.1: cannot open shared object file", "GPU driver"),
        ("OSError: We couldn't connect to 'https://huggingface.co' to load", "hub model"),
        ("RuntimeError: Engine core initialization failed.", "real engine"),
        ("ModuleNotFoundError: No module named 'mooncake'", "package that is not installed"),
        ("Failed: Timeout (>120.0s) from pytest-timeout.", "hang"),
        ("the interpreter died of SIGSEGV in this test", "crash of the interpreter"),
        ("AssertionError: assert 1 == 2", "assertion of the test"),
        ("KeyError: 'x'", "other"),
    ],
)
def test_a_failure_has_a_class_of_reasons(message: str, name: str) -> None:
    assert reason(Outcome("failed", "", message)) == name


def test_what_is_said_is_the_same_on_every_machine() -> None:
    message = "AttributeError: <X at 0x7f12ab34cd56> of /home/me/.work/site/vllm/x.py\nmore"
    assert said(Outcome("failed", "", message)) == "AttributeError: <X at 0x…> of …/x.py"
    trace = "def test():\n    import x\nE   ModuleNotFoundError: No module named 'x'\n"
    assert said(Outcome("error", "", trace)) == "E   ModuleNotFoundError: No module named 'x'"
    assert said(Outcome("error")) == ""

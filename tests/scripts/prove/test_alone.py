"""What a fix did alone is taken from the record where its key holds, and run anew elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.prove.alone import Alone, passed
from scripts.prove.outcomes import Outcome
from tests.scripts.carrying import HOOKED, carrying, change
from tests.scripts.checkouts import Checkout, copied

FILES = {name: f"tests/regressions/test_{name}.py" for name in "12"}
# Fix 2 changes no more than a line of the release; fix 1 calls what is in HOOKED as well.
PATCH = "patches/1-a-name/0.20.2.patch"
NONE, BOTH = "0 {} (none)", "2 {} (1, 2)"


@pytest.fixture(scope="module")
def proven(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """Return a small patch set after a session of all fixes."""
    made = carrying(tmp_path_factory.mktemp("made"))
    assert regressions(made) == ran(BOTH, NONE)
    return made


@pytest.fixture
def checkout(proven: Checkout, tmp_path: Path) -> Checkout:
    """Return a copy of it elsewhere, as on another machine."""
    return copied(proven, tmp_path)


def regressions(checkout: Checkout, *words: str, faults: int = 0) -> str:
    """Run the session; return what it says of which fixes were run alone."""
    done = checkout.run("regressions", *words)
    assert "Traceback" not in done.stderr, done.stderr
    assert done.stderr.count("✗ ") == faults, done.stderr
    assert bool(done.returncode) is bool(faults)
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("alone: "))
    return line


def ran(now: str, taken: str) -> str:
    return f"alone: {now.format('run now')}, {taken.format('on record')}"


def report(checkout: Checkout) -> dict[str, Any]:
    path = checkout.folder / "reports" / "regressions-0.20.2.json"
    fixes: dict[str, Any] = json.loads(path.read_text())["fixes"]
    return fixes


def records(checkout: Checkout) -> Path:
    return checkout.folder / "records" / "proofs" / "0.20.2.json"


def alone(checkout: Checkout) -> dict[str, list[str]]:
    """Return what is on record as passed, by the fix that was alone."""
    document = json.loads(records(checkout).read_text())
    return {fix: row["alone"]["passed"] for fix, row in document.items() if "alone" in row}


def test_is_taken_and_gives_the_same_verdict(checkout: Checkout) -> None:
    assert alone(checkout) == {name: [file] for name, file in FILES.items()}
    before, of_run = records(checkout).read_bytes(), report(checkout)
    assert not any(fix["on_record"] for fix in of_run.values())
    assert regressions(checkout) == ran(NONE, BOTH)
    assert records(checkout).read_bytes() == before
    assert report(checkout) == {name: {**row, "on_record": True} for name, row in of_run.items()}


def test_is_run_on_what_it_touches_unless_all_is_asked_for(checkout: Checkout) -> None:
    kept = alone(checkout)
    for words, tests in (([], 2), (["--again"], 4)):
        records(checkout).unlink()
        done = checkout.run("regressions", *words)
        assert f"2 fixes alone, {tests} tests" in done.stderr
        assert alone(checkout) == kept


def test_is_run_all_the_same_when_asked(checkout: Checkout) -> None:
    before = records(checkout).read_bytes()
    assert regressions(checkout, "--again") == ran(BOTH, NONE)
    assert records(checkout).read_bytes() == before


@pytest.mark.parametrize(
    ("path", "old", "new", "now", "taken"),
    [
        (FILES["2"], "== 2", "== 1 + 1", BOTH, NONE),
        (FILES["2"], "== 2", "== 2  # one more", NONE, BOTH),
        (HOOKED, "print(x)", "print(x, x)", "1 {} (1)", "1 {} (2)"),
        (HOOKED, "print(x)", "print(x)  # say it", NONE, BOTH),
        (PATCH, "+    return work1(x)", "+    return work1(x + 0)", "1 {} (1)", "1 {} (2)"),
        ("pyproject.toml", "timeout = 300", "timeout = 299", BOTH, NONE),
    ],
)
def test_is_run_again_with_what_can_change_an_outcome(
    checkout: Checkout, path: str, old: str, new: str, now: str, taken: str
) -> None:
    change(checkout.folder / path, old, new)
    assert regressions(checkout) == ran(now, taken)
    assert regressions(checkout) == ran(NONE, BOTH)


def test_only_tests_that_have_changed_are_run_again(checkout: Checkout) -> None:
    change(checkout.folder / FILES["2"], "== 2", "== 1 + 1")
    document = json.loads(records(checkout).read_text())
    document["1"]["alone"]["passed"] = []
    document["2"]["alone"]["passed"] = []
    records(checkout).write_text(json.dumps(document))
    assert regressions(checkout, faults=1) == ran(BOTH, NONE)
    assert [row["flips_alone"] for row in report(checkout).values()] == [False, True]


def test_of_fewer_tests_is_not_put_there(checkout: Checkout) -> None:
    change(checkout.folder / FILES["1"], "== 2", "== 1 + 1")
    before = alone(checkout)
    one = ran("1 {} (1)", NONE)
    assert regressions(checkout, "--fix", "1") == one
    assert regressions(checkout, "--fix", "1") == one
    assert alone(checkout) == before
    assert regressions(checkout) == ran(BOTH, NONE)
    assert regressions(checkout, "--fix", "1") == ran(NONE, "1 {} (1)")


def test_with_a_fault_is_not_put_there(checkout: Checkout) -> None:
    both = "== 2\n    from vllm.worker import work2\n    assert work2(1) == 2"
    change(checkout.folder / FILES["2"], "== 2", both)  # it needs fix 1 too, and does not say so
    assert regressions(checkout, faults=1) == ran(BOTH, NONE)
    assert alone(checkout) == {"1": [FILES["1"]]}
    assert regressions(checkout, faults=1) == ran("1 {} (2)", "1 {} (1)")
    assert alone(checkout) == {"1": [FILES["1"]]}


def test_what_passed_there_is_judged_anew(checkout: Checkout) -> None:
    document = json.loads(records(checkout).read_text())
    document["1"]["alone"]["passed"] = [*FILES.values()]
    document["2"]["alone"]["passed"] = []
    records(checkout).write_text(json.dumps(document))
    assert regressions(checkout, faults=2) == ran(NONE, BOTH)
    assert [row["flips_alone"] for row in report(checkout).values()] == [False, False]


def test_a_name_stands_for_all_tests_that_passed() -> None:
    each = {
        "a.py::one": "passed",
        "a.py::Two::of[1]": "passed",
        "b.py::one[1]": "passed",
        "b.py::one[2::x]": "passed",
        "b.py::two[1]": "passed",
        "b.py::two[2]": "failed",
        "b.py::one_more": "failed",
        "c.py::one": "failed",
    }
    outcomes = {node: Outcome(result) for node, result in each.items()}
    assert passed(outcomes) == ("a.py", "b.py::one", "b.py::two[1]")
    assert Alone({}, passed(outcomes)).outcomes(each) == outcomes

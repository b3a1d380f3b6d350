"""What `nox -s regressions` makes of what it saw; the runs themselves need vLLM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.patchset.registry import Registry, Spared, Unpatched
from scripts.project import ROOT
from scripts.prove.outcomes import Outcome, Outcomes, outcomes_of
from scripts.prove.record import of_fix
from scripts.prove.regressions import Verdict, _faults, _sound, as_json
from tests.scripts import toys

FILE = "tests/regressions/test_{}.py"
PASSED = Outcome("passed")
FAILED = Outcome("failed", "tests/regressions/test_1.py:5", "AssertionError: 1 == 2", "test")
RAISED = Outcome("failed", "vllm/worker.py:5", "AttributeError: no such name", "release")
ERROR = Outcome("error", "tests/regressions/test_1.py:1", "ImportError: no such name", "harness")
SKIPPED = Outcome("skipped", "", "no GPU")


def registry() -> Registry:
    """Return two fixes that have nothing to do with each other, and one on top of the first."""
    return toys.registry(
        toys.fix("1"),
        toys.fix("2"),
        toys.fix("3", depends_on=("1",)),
        toys.fix("4", applies_to="<0.20"),
    )


def outcomes(**each: Outcome) -> Outcomes:
    """Return `_1=…` as the outcome of one test of fix 1."""
    return {f"{FILE.format(name[1:])}::test": outcome for name, outcome in each.items()}


def faults(
    stock: Outcome = FAILED,
    patched: Outcome = PASSED,
    alone: Outcomes | None = None,
    *,
    fix: str = "1",
) -> list[str]:
    known = registry()
    affected = known.fixes[fix].affects("0.20.2")
    verdict = Verdict(
        fix=fix,
        affected=affected,
        stock=outcomes(**{f"_{fix}": stock}),
        patched=outcomes(**{f"_{fix}": patched}),
        alone=outcomes(_1=PASSED, _2=FAILED, _3=FAILED, _4=PASSED) if alone is None else alone,
    )
    return list(_faults(verdict, list(known.fixes.values()), "0.20.2", known))


def test_a_fix_is_proven_by_its_tests_on_all_sides() -> None:
    assert faults() == []


@pytest.mark.parametrize(
    ("stock", "said"),
    [
        (PASSED, "stock: tests/regressions/test_1.py::test passed, expected failed"),
        (SKIPPED, "stock: tests/regressions/test_1.py::test skipped, expected failed"),
        (ERROR, "stock: tests/regressions/test_1.py::test error, expected failed (tests/"),
        (
            Outcome("error", "", "pytest ended with -11: x", "harness"),
            "(pytest ended with -11: x);",
        ),
        (RAISED, "no test fails on stock by an assertion about behaviour"),
        (ERROR, "no test fails on stock by an assertion about behaviour"),
    ],
)
def test_what_stock_does_not_show_is_a_fault(stock: Outcome, said: str) -> None:
    assert any(said in fault for fault in faults(stock=stock))


@pytest.mark.parametrize("patched", [FAILED, RAISED, SKIPPED, ERROR])
def test_what_does_not_pass_on_patched_is_a_fault(patched: Outcome) -> None:
    (fault,) = faults(patched=patched)
    assert (
        f"1, patched: tests/regressions/test_1.py::test {patched.result}, expected passed" in fault
    )


@pytest.mark.parametrize(
    ("alone", "said"),
    [
        ({"_1": FAILED, "_2": FAILED, "_3": FAILED}, "1, alone, tests of 1: "),
        ({"_1": PASSED, "_2": PASSED, "_3": FAILED}, "1, alone, tests of 2: "),
        ({"_1": PASSED, "_2": FAILED, "_3": PASSED}, "1, alone, tests of 3: "),
        ({"_1": PASSED, "_2": ERROR, "_3": FAILED}, "1, alone, tests of 2: "),
        ({"_1": PASSED, "_2": FAILED}, "1, alone, tests of 3: no test ran"),
    ],
)
def test_alone_a_fix_turns_its_own_tests_and_no_others(
    alone: dict[str, Outcome], said: str
) -> None:
    (fault,) = faults(alone=outcomes(**alone))
    assert fault.startswith(said)


def test_alone_a_fix_turns_the_tests_of_what_it_depends_on() -> None:
    both = outcomes(_1=PASSED, _2=FAILED, _3=PASSED)
    assert faults(fix="3", alone=both) == []
    (fault,) = faults(fix="3", alone=outcomes(_1=FAILED, _2=FAILED, _3=PASSED))
    assert fault.startswith("3, alone, tests of 1: ")


@pytest.mark.parametrize(
    ("alone", "kept"),
    [
        ({"_1": PASSED, "_2": FAILED, "_3": FAILED}, True),
        ({"_1": PASSED, "_2": FAILED, "_3": FAILED, "_4": SKIPPED}, True),  # of no concern there
        ({"_1": FAILED, "_2": FAILED, "_3": FAILED}, False),
        ({"_1": PASSED, "_2": ERROR, "_3": FAILED}, False),
        ({"_1": PASSED, "_2": FAILED, "_3": FAILED, "_2::more": FAILED}, False),
    ],
)
def test_alone_only_what_has_no_fault_and_no_other_tests_than_stock_is_kept(
    alone: dict[str, Outcome], kept: bool
) -> None:
    known = registry()
    seen = {f"{FILE.format(name[1])}::test{name[2:]}": outcome for name, outcome in alone.items()}
    verdict = Verdict("1", True, outcomes(_1=FAILED), outcomes(_1=PASSED), seen)
    stock = outcomes(_1=FAILED, _2=FAILED, _3=FAILED, _4=PASSED)
    found = _sound(verdict, stock, list(known.fixes.values()), "0.20.2", known)
    assert found == (outcomes(_1=PASSED, _2=FAILED, _3=FAILED) if kept else None)


@pytest.mark.parametrize("name", ["1", "2"])
def test_alone_a_fix_turns_the_tests_of_what_it_closes_too(name: str) -> None:
    row = Unpatched("<=0.20.2", "the same blocks", closed_by="1")
    known = toys.registry(toys.fix("1"), toys.fix("2", unpatched=(row,)))
    own = {f"_{name}": FAILED}
    alone = outcomes(_1=PASSED, _2=PASSED)
    verdict = Verdict(name, True, outcomes(**own), dict.fromkeys(outcomes(**own), PASSED), alone)
    fixes = list(known.fixes.values())
    assert list(_faults(verdict, fixes, "0.20.2", known)) == []
    verdict.alone = outcomes(_1=PASSED, _2=FAILED)
    (fault,) = _faults(verdict, fixes, "0.20.2", known)
    assert fault.startswith(f"{name}, alone, tests of 2: ")


def test_on_a_release_without_the_defect_its_tests_have_to_pass() -> None:
    assert faults(fix="4", stock=PASSED) == []
    (fault,) = faults(fix="4", stock=FAILED)
    assert "failed, expected passed" in fault


class TestOfAPartThatAReleaseDoesNotHave:
    """A test of fix 1 that is listed as spared has to pass on stock, and the others to fail."""

    def faults(
        self, *, part: Outcome, rest: Outcome = FAILED, releases: str = "==0.20.2"
    ) -> list[str]:
        parts = [f"{FILE.format(1)}::part", "tests/pd/test_one.py::of_a_deployment"]
        spared = Spared(releases, parts, "upstream has that part")
        known = toys.registry(toys.fix("1", spared=(spared,)), toys.fix("2"))
        stock = {**outcomes(_1=rest), f"{FILE.format(1)}::part[a]": part}
        patched = dict.fromkeys(stock, PASSED)
        first = Verdict("1", True, stock, patched, {**patched, **outcomes(_2=FAILED)})
        second = Verdict(
            "2", True, outcomes(_2=FAILED), outcomes(_2=PASSED), {**stock, **outcomes(_2=PASSED)}
        )
        fixes = list(known.fixes.values())
        return [f for v in (first, second) for f in _faults(v, fixes, "0.20.2", known)]

    def test_passes_on_stock_and_with_another_fix_alone(self) -> None:
        assert self.faults(part=PASSED) == []

    def test_is_a_fault_where_it_fails(self) -> None:
        stock, alone = self.faults(part=FAILED)
        assert stock.startswith("1, stock, spared ")
        assert alone.startswith("2, alone, tests of 1, spared ")

    def test_is_a_fault_on_other_releases(self) -> None:
        assert len(self.faults(part=PASSED, releases="==0.21.0")) == 2

    def test_does_not_excuse_the_others(self) -> None:
        assert any("expected failed" in fault for fault in self.faults(part=PASSED, rest=PASSED))

    def test_has_to_exist(self) -> None:
        spared = Spared(">=0.1", ["tests/a.py::gone"], "no such test")
        known = toys.registry(toys.fix("1", spared=(spared,)))
        verdict = Verdict("1", True, outcomes(_1=FAILED), outcomes(_1=PASSED), outcomes(_1=PASSED))
        (fault,) = _faults(verdict, list(known.fixes.values()), "0.20.2", known)
        assert fault == "1, stock, spared tests/a.py::gone: no test ran"


def test_a_test_that_is_named_and_does_not_run_is_a_fault() -> None:
    known = toys.registry(toys.fix("1", tests=(FILE.format(1), "tests/a.py::gone")))
    verdict = Verdict("1", True, outcomes(_1=FAILED), outcomes(_1=PASSED), outcomes(_1=PASSED))
    assert list(_faults(verdict, list(known.fixes.values()), "0.20.2", known)) == [
        "1, stock: tests/a.py::gone did not run",
        "1, patched: tests/a.py::gone did not run",
    ]


def test_a_test_that_runs_on_one_side_only_is_a_fault() -> None:
    known = toys.registry(toys.fix("1"))
    more = {**outcomes(_1=FAILED), f"{FILE.format(1)}::more": FAILED}
    verdict = Verdict("1", True, more, outcomes(_1=PASSED), outcomes(_1=PASSED))
    (fault,) = _faults(verdict, list(known.fixes.values()), "0.20.2", known)
    assert "test_1.py::more ran on one side only" in fault


def test_nothing_at_all_is_no_success() -> None:
    verdict = Verdict("1", True, {}, {}, {})
    found = list(_faults(verdict, [registry().fixes["1"]], "0.20.2", registry()))
    assert {fault.partition(":")[0] for fault in found} >= {"1, stock", "1, patched"}
    assert any("1: no test fails on stock by an assertion about" in fault for fault in found)


def test_one_test_of_several_may_end_in_what_the_release_raises() -> None:
    known = toys.registry(toys.fix("1"))
    stock = {**outcomes(_1=FAILED), f"{FILE.format(1)}::name": RAISED}
    patched = dict.fromkeys(stock, PASSED)
    assert list(_faults(Verdict("1", True, stock, patched, patched), [], "0.20.2", known)) == []


@pytest.mark.parametrize(
    ("node", "belongs"),
    [
        ("tests/a.py::test", True),
        ("tests/a.py::Test::test[x]", True),
        ("tests/a.py", True),
        ("tests/a.pyx::test", False),
        ("tests/b.py::one", True),
        ("tests/b.py::one[x-1]", True),
        ("tests/b.py::one_more", False),
        ("tests/b.py::two", False),
    ],
)
def test_a_node_belongs_to_the_fix_that_names_it(node: str, belongs: bool) -> None:
    fix = toys.fix("1", tests=("tests/a.py", "tests/b.py::one"))
    assert bool(of_fix(fix, "0.20.2", {node: PASSED})) is belongs


@pytest.mark.parametrize(("release", "says"), [("0.20.2", False), ("0.21.0", True)])
def test_a_part_without_a_patch_is_left_out(release: str, says: bool) -> None:
    part = Unpatched("==0.20.2", "nobody can meet it", ["tests/a.py::part"])
    fix = toys.fix("1", tests=("tests/a.py",), unpatched=(part,))
    assert fix.unpatched_on(release) == ""
    assert bool(of_fix(fix, release, {"tests/a.py::part[x]": FAILED})) is says
    assert of_fix(fix, release, {"tests/a.py::rest": FAILED})


def test_the_report_says_whether_a_fix_stands_alone() -> None:
    verdict = Verdict("1", True, outcomes(_1=FAILED), outcomes(_1=PASSED), outcomes(_1=PASSED))
    document = as_json(verdict)
    assert json.loads(json.dumps(document)) == document
    assert document["flips_alone"] is True
    assert document["stock"] == {
        "tests/regressions/test_1.py::test": {
            "result": "failed",
            "place": "tests/regressions/test_1.py:5",
            "message": "AssertionError: 1 == 2",
            "raised": "test",
        }
    }
    verdict.faults.append("1, alone, tests of 2: x passed, expected failed")
    assert as_json(verdict)["flips_alone"] is False


def row(node: str, outcome: str, when: str = "call", **more: object) -> dict[str, object]:
    return {"$report_type": "TestReport", "nodeid": node, "outcome": outcome, "when": when, **more}


def crash(message: str) -> dict[str, object]:
    path = str(ROOT / "tests" / "a.py")
    return {"reprcrash": {"path": path, "lineno": 7, "message": message}}


def test_outcomes_are_read_from_what_pytest_reports(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"$report_type": "SessionStart"},
        {"$report_type": "CollectReport", "nodeid": "tests/a.py", "outcome": "passed"},
        *(row("a", "passed", when) for when in ("setup", "call", "teardown")),
        row("b", "passed", "setup"),
        row("b", "failed", longrepr=crash("AssertionError: x\nassert 1 == 2"), raised="test"),
        row("b", "passed", "teardown"),
        row("c", "failed", "setup", longrepr=crash("OSError: y")),
        row("h", "failed", longrepr=crash("RuntimeError: w"), raised="harness"),
        row("i", "failed", longrepr=crash("KeyError: v"), raised="release"),
        row("d", "passed"),
        row("d", "failed", "teardown", longrepr="words"),
        row("e", "skipped", "setup", longrepr=["a", 1, "why"]),
        row("f", "passed", "setup"),  # and then the process was killed
        {"$report_type": "CollectReport", "nodeid": "g.py", "outcome": "failed",
         "longrepr": {"longrepr": "ImportError: z"}},
    ]  # fmt: skip
    log = tmp_path / "log"
    log.write_text("\n".join(map(json.dumps, rows)))
    found = outcomes_of(log)
    assert found["a"] == Outcome("passed")
    assert found["b"] == Outcome("failed", "tests/a.py:7", "AssertionError: x", "test")
    assert found["b"].is_assertion
    assert found["c"] == Outcome("error", "tests/a.py:7", "OSError: y", "harness")
    assert found["h"] == Outcome("error", "tests/a.py:7", "RuntimeError: w", "harness")
    assert found["i"] == Outcome("failed", "tests/a.py:7", "KeyError: v", "release")
    assert found["d"].result == "error"
    assert found["e"].result == "skipped"
    assert "f" not in found
    assert found["g.py"].result == "error"
    assert "ImportError: z" in found["g.py"].message


@pytest.mark.parametrize(
    ("outcome", "counts"),
    [
        (Outcome("failed", "tests/a.py:1", "assert 1 == 2", "test"), True),
        (Outcome("failed", "vllm/a.py:1", "assert 1 == 2", "release"), False),
        (Outcome("error", "tests/a.py:1", "RuntimeError: no process", "harness"), False),
        # As records were before it was noted.
        (Outcome("failed", "tests/a.py:1", "assert 1 == 2"), True),
        (Outcome("failed", "tests/a.py:1", "Failed: DID NOT RAISE <class 'OSError'>"), True),
        (Outcome("failed", ".work/stage/tests/a.py:1", "AssertionError: it dies"), False),
        (Outcome("failed", "vllm/worker.py:1", "AssertionError: in upstream's code"), False),
        (Outcome("failed", "tests/a.py:1", "KeyError: 'engine'"), False),
        (Outcome("error", "tests/a.py:1", "assert 1 == 2"), False),
        (Outcome("passed"), False),
    ],
)
def test_only_an_assertion_of_ours_shows_behaviour(outcome: Outcome, counts: bool) -> None:
    assert outcome.is_assertion is counts

"""What `nox -s pd` makes of what it saw; the runs themselves need two servers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.patchset.registry import Spared, Unpatched
from scripts.pd.deployment import Scenario, enter, faults_of, write_report
from scripts.pd.environment import _pinned, _requirements
from scripts.pd.picture import draw
from scripts.prove.outcomes import Outcome
from scripts.system.errors import NotLockedError
from tests.scripts import toys

NODE = "tests/pd/test_one.py::test"
PASSED = Outcome("passed")
FAILED = Outcome("failed", "tests/pd/test_one.py:5", "AssertionError: P holds 7 blocks")
RAISED = Outcome("failed", "httpx/client.py:5", "ConnectError: refused")
SKIPPED = Outcome("skipped", "", "no reason")
BOTH = ["stock", "patched"]


def faults(shows: tuple[str, ...] = (), **outcomes: Outcome) -> list[str]:
    registry = toys.registry(toys.fix("1"), toys.fix("2", applies_to="<0.20"))
    scenarios = {NODE: Scenario(NODE, shows, outcomes)}
    return list(faults_of(scenarios, list(outcomes), "0.20.2", registry))


def test_a_defect_is_shown_on_stock_and_absent_on_patched() -> None:
    assert faults(("1",), stock=FAILED, patched=PASSED) == []


def test_what_shows_no_defect_of_this_release_passes_on_both_sides() -> None:
    assert faults(stock=PASSED, patched=PASSED) == []
    assert faults(("2",), stock=PASSED, patched=PASSED) == []


def test_a_defect_that_gets_no_patch_on_this_release_is_there_on_both_sides() -> None:
    why = Unpatched(releases="<=0.20.2", reason="it stands on another")
    registry = toys.registry(toys.fix("1", unpatched=(why,)))

    def said(patched: Outcome) -> list[str]:
        scenarios = {NODE: Scenario(NODE, ("1",), {"stock": FAILED, "patched": patched})}
        return list(faults_of(scenarios, BOTH, "0.20.2", registry))

    assert said(FAILED) == []
    assert said(PASSED) == [f"patched: {NODE} passed, expected failed"]


def test_a_defect_that_another_patch_closes_is_absent_on_patched() -> None:
    why = Unpatched(releases="<=0.20.2", reason="as well", closed_by="2")
    registry = toys.registry(toys.fix("2"), toys.fix("1", unpatched=(why,)))
    scenarios = {NODE: Scenario(NODE, ("1",), {"stock": FAILED, "patched": PASSED})}
    assert list(faults_of(scenarios, BOTH, "0.20.2", registry)) == []


def test_a_scenario_that_the_release_does_not_show_passes_on_both_sides() -> None:
    spared = Spared(">=0.20", (NODE,), "upstream has that part")
    registry = toys.registry(toys.fix("1", spared=(spared,)))

    def said(stock: Outcome) -> list[str]:
        scenarios = {NODE: Scenario(NODE, ("1",), {"stock": stock, "patched": PASSED})}
        return list(faults_of(scenarios, BOTH, "0.20.2", registry))

    assert said(PASSED) == []
    assert said(FAILED) == [
        f"stock: {NODE} failed, expected passed (tests/pd/test_one.py:5: {FAILED.message})"
    ]


def test_one_of_several_defects_is_enough() -> None:
    assert faults(("2", "1"), stock=FAILED, patched=PASSED) == []


def test_one_side_can_be_run_alone() -> None:
    assert faults(("1",), stock=FAILED) == []
    assert faults(("1",), patched=PASSED) == []


@pytest.mark.parametrize(
    ("shows", "stock", "patched", "said"),
    [
        (("1",), PASSED, PASSED, "stock: tests/pd/test_one.py::test passed, expected failed"),
        (("1",), SKIPPED, PASSED, "stock: tests/pd/test_one.py::test skipped, expected failed"),
        (("1",), RAISED, PASSED, "failed elsewhere: httpx/client.py:5 ConnectError"),
        (("1",), FAILED, FAILED, "patched: tests/pd/test_one.py::test failed, expected passed"),
        (("1",), FAILED, SKIPPED, "patched: tests/pd/test_one.py::test skipped, expected passed"),
        ((), FAILED, PASSED, "stock: tests/pd/test_one.py::test failed, expected passed"),
        (("2",), FAILED, PASSED, "stock: tests/pd/test_one.py::test failed, expected passed"),
    ],
)
def test_anything_else_is_a_fault(
    shows: tuple[str, ...], stock: Outcome, patched: Outcome, said: str
) -> None:
    (fault,) = faults(shows, stock=stock, patched=patched)
    assert said in fault


def test_a_test_that_did_not_run_on_patched_is_a_fault() -> None:
    registry = toys.registry(toys.fix("1"))
    scenarios = {NODE: Scenario(NODE, ("1",), {"stock": FAILED})}
    (fault,) = faults_of(scenarios, BOTH, "0.20.2", registry)
    assert fault == f"{NODE} did not run on patched"


def test_outcomes_and_figures_are_read_from_what_pytest_logged(tmp_path: Path) -> None:
    row = {
        "$report_type": "TestReport",
        "nodeid": NODE,
        "when": "call",
        "outcome": "passed",
        "user_properties": [["shows", ["1"]], ["released_s", 0.2]],
    }
    log = tmp_path / "pytest.jsonl"
    log.write_text(json.dumps(row))
    scenarios: dict[str, Scenario] = {}
    enter(log, "patched", scenarios)
    expected = Scenario(NODE, ("1",), {"patched": PASSED}, {"patched": {"released_s": 0.2}})
    assert scenarios == {NODE: expected}


def test_a_run_of_one_side_renews_its_entries_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scripts.pd.deployment.REPORTS", tmp_path)
    both = {"stock": FAILED, "patched": FAILED}
    other = Scenario("other", (), {"patched": PASSED})
    first = {NODE: Scenario(NODE, ("1",), both), "other": other}
    write_report("0.20.2", first, {"stock": 9.0, "patched": 7.0}, whole=True)
    again = {NODE: Scenario(NODE, ("1",), {"patched": PASSED})}
    write_report("0.20.2", again, {"patched": 1.0}, whole=False)
    report = json.loads((tmp_path / "pd-0.20.2.json").read_text())
    assert report["seconds"] == {"stock": 9.0, "patched": 7.0}
    assert report["scenarios"][NODE]["stock"]["result"] == "failed"
    assert report["scenarios"][NODE]["patched"]["result"] == "passed"
    assert report["scenarios"]["other"]["patched"]["result"] == "passed"


def test_a_release_without_a_pinned_wheel_is_refused() -> None:
    with pytest.raises(NotLockedError) as error:
        _pinned("0.1.0")
    assert "0.20.2" in error.value.expected


def test_torch_is_the_plain_one_and_extras_are_nobodys() -> None:
    metadata = b"""\
Requires-Dist: torch==2.11.0+cpu; platform_machine != "none"
Requires-Dist: torch==2.11.0; platform_machine == "none"
Requires-Dist: torchvision
Requires-Dist: torchaudio
Requires-Dist: regex
Requires-Dist: scipy; extra == "audio"
Requires-Dist: six; python_version > "3"
"""
    assert _requirements(metadata) == [
        "torch==2.11.0",
        "torchvision",
        "regex",
        'six; python_version > "3"',
    ]


def test_the_picture_has_the_same_bytes_each_time(tmp_path: Path) -> None:
    seen = [(0.2 * n, n / 100) for n in range(50)]
    measured = {"usage": seen, "last_refusal_s": 5.0, "refused": 50, "lease_s": 30}
    figures = {"stock": measured, "patched": measured}
    path = draw("0.20.2", figures, tmp_path)
    assert path.name == "pd-usage-0.20.2.svg"
    first = path.read_bytes()
    assert draw("0.20.2", figures, tmp_path).read_bytes() == first

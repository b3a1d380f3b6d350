"""What `nox -s push` makes of what two sides saw; the sides themselves need vLLM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from scripts.commands import push as command
from scripts.prove import push
from scripts.prove.outcomes import Outcome, Outcomes
from scripts.prove.push import Shown, judge, record, recorded, shown, table, write_page
from scripts.prove.pytest import Run
from scripts.system.errors import CheckFailedError, UsageError

PASSED = Outcome("passed")
FAILED = Outcome("failed", push.TESTS, "assert 1 == 2", "test")
MENDED = Shown("test_a", "K04", SpecifierSet(">=0.24.0"), "D's engine ends.")
LEFT = Shown("test_a", "-", None, "D waits for ever.")

SOURCE = '''
@shows("K04", mends=">=0.24.0")
@pytest.mark.parametrize("missing", ["a", "b"])
def test_a(missing):
    """D's engine ends.

    And more.
    """

@shows("-")
def test_b():
    """D waits for ever."""

def helper():
    """Not a test."""
'''


def of(outcome: Outcome, case: str = "") -> Outcomes:
    return {f"{push.TESTS}::test_a{case}": outcome}


def verdict(one: Shown, stock: Outcomes, patched: Outcomes) -> tuple[push.Seen, list[str]]:
    return judge("0.28.0", [one], {"stock": stock, "patched": patched})


def test_a_test_says_which_defect_it_shows() -> None:
    first, second = shown(SOURCE)
    assert first == MENDED
    assert (second.test, second.defect, second.mends) == ("test_b", "-", None)


@pytest.mark.parametrize("cut", ['@shows("-")', '    """D waits for ever."""\n'])
def test_a_test_that_does_not_say_it(cut: str) -> None:
    with pytest.raises(ValueError, match="test_b needs one mark"):
        shown(SOURCE.replace(cut, "    pass\n" if cut.startswith(" ") else ""))


def test_all_tests_say_it() -> None:
    found = push.all_shown()
    assert len({one.test for one in found}) == len(found) > 10
    assert any(one.mends for one in found)


def test_what_is_mended() -> None:
    seen, faults = verdict(MENDED, of(FAILED), of(PASSED))
    assert seen == {"test_a": {"stock": "failed", "patched": "passed"}}
    assert not faults


@pytest.mark.parametrize(
    ("one", "stock", "patched", "fault"),
    [
        (MENDED, of(PASSED), of(PASSED), "does not fail on stock"),
        (MENDED, {**of(FAILED, "[a]"), **of(PASSED, "[b]")}, of(PASSED), "not wholly"),
        (MENDED, of(FAILED), of(FAILED), "fails on patched, which mends K04"),
        (LEFT, of(PASSED), of(FAILED), "passes on stock and fails on patched"),
    ],
)
def test_what_is_not_as_it_should_be(
    one: Shown, stock: Outcomes, patched: Outcomes, fault: str
) -> None:
    seen, faults = verdict(one, stock, patched)
    assert seen
    assert [fault in line for line in faults] == [True]


def test_where_nobody_claims_anything_both_may_fail() -> None:
    elsewhere = Shown("test_a", "K04", SpecifierSet(">=0.30"), "D's engine ends.")
    for one in (LEFT, elsewhere):
        assert not verdict(one, of(FAILED), of(FAILED))[1]


@pytest.mark.parametrize(
    "shows_nothing",
    [
        {},
        of(Outcome("failed", "vllm/x.py:1", "KeyError", "release")),
        of(Outcome("error", "", "HarnessError", "harness")),
        of(Outcome("skipped")),
    ],
)
def test_what_shows_nothing_is_a_fault_and_not_recorded(shows_nothing: Outcomes) -> None:
    for sides in ((shows_nothing, of(PASSED)), (of(FAILED), shows_nothing)):
        seen, faults = verdict(LEFT, *sides)
        assert not seen
        assert len(faults) == 1


def test_a_record_takes_the_place_of_an_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "push.json"
    assert recorded(path) == {}
    one, other = ({"test_a": {"stock": "failed", "patched": side}} for side in ("passed", "failed"))
    for release, seen in (("0.28.0", one), ("0.24.0", other), ("0.28.0", other)):
        record(release, seen, path)
    assert list(recorded(path).items()) == [("0.24.0", other), ("0.28.0", other)]


def test_the_table_names_releases_that_show_the_same_once() -> None:
    seen = {"test_a": {"stock": "failed", "patched": "passed"}}
    both = {"test_a": {"stock": "failed", "patched": "failed"}}
    document = {"0.24.0": seen, "0.25.0": seen, "0.26.0": both, "0.28.0": {}}
    made = table([MENDED, LEFT], document, ["0.24.0", "0.25.0", "0.26.0", "0.27.0", "0.28.0"])
    head, _, first, second = made.splitlines()
    assert head == "| defect | like | 0.24.0, 0.25.0 | 0.26.0 | 0.27.0, 0.28.0 |"
    assert first == (
        "| D's engine ends | [K04](fixes.md#k04) | ✗ stock ✓ patched | ✗ both | not run |"
    )
    assert second.startswith("| D waits for ever | - |")


def test_the_page_keeps_its_prose(tmp_path: Path) -> None:
    page = tmp_path / "push.md"
    page.write_text("Before.\n<!-- table, made by x -->\nold\n<!-- end of table -->\nAfter.\n")
    write_page(page)
    text = page.read_text(encoding="utf-8")
    assert text.startswith("Before.\n<!-- table, made by x -->\n| defect |")
    assert text.endswith("|\n<!-- end of table -->\nAfter.\n")
    assert "old" not in text


def test_the_page_shows_what_is_on_record() -> None:
    made = table(push.all_shown(), recorded(), push.releases())
    assert made in push.PAGE.read_text(encoding="utf-8")


class Used:
    """Stands in for an environment in which another command has left a patched wheel."""

    stock = "the stock wheel"

    def __init__(self, release: str) -> None:
        self.release = release
        self.installed = "a patched wheel"

    def make(self) -> Used:
        return self

    def install(self, wheel: str) -> None:
        self.installed = wheel

    def shadow(self, folder: Path, _: object) -> Path:
        assert self.installed == self.stock
        return folder


def test_stock_is_stock_whatever_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_together(
        environment: Used, runs: dict[str, Run], **_: object
    ) -> tuple[dict[str, Outcomes], None]:
        assert environment.installed == environment.stock
        return {side: {} for side, run in runs.items() if run.shadow or side == "stock"}, None

    monkeypatch.setattr(push, "Environment", Used)
    monkeypatch.setattr(push, "run_together", run_together)
    assert push.observe("0.28.0").keys() == {"stock", "patched"}


def test_the_command_fails_after_it_has_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, kept = tmp_path / "push.md", tmp_path / "push.json"
    monkeypatch.setattr("sys.argv", ["push", "0.28.0"])
    monkeypatch.setattr(command, "all_shown", lambda: [MENDED])
    monkeypatch.setattr(command, "observe", lambda _: {"stock": of(PASSED), "patched": of(PASSED)})
    monkeypatch.setattr(command, "record", lambda release, seen: record(release, seen, kept))
    monkeypatch.setattr(command, "write_page", lambda: page.touch())
    with pytest.raises(CheckFailedError) as failed:
        command.main()
    assert failed.value.next_step.endswith("nox -s push -- 0.28.0")
    assert list(json.loads(kept.read_text())) == ["0.28.0"]
    assert page.exists()


def test_a_release_without_such_a_connector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["push", "0.20.2"])
    with pytest.raises(UsageError, match=r"0\.20\.2 has no connector that pushes"):
        command.main()

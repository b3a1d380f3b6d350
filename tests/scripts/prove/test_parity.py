"""What `nox -s parity` makes of what two sides saw; the sides themselves need vLLM."""

from __future__ import annotations

import json
import os
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from scripts.commands import parity as command
from scripts.prove import parity
from scripts.prove.environment import Environment
from scripts.prove.parity import Comparison, compared, differences, read_rows
from scripts.system.console import out
from scripts.system.errors import CheckFailedError, UsageError

NAME = "endpoints.answers[none]"


def row(observed: object = None, **outcome: Any) -> dict[str, Any]:  # noqa: ANN401 - a row's fields
    return {"name": NAME, "shows": [], "seconds": 0.5, **(outcome or {"observed": observed})}


def verdict(stock: dict[str, Any] | None, patched: dict[str, Any] | None) -> Comparison:
    mine, theirs = ({NAME: side} if side else {} for side in (stock, patched))
    (only,) = compared(mine, theirs, fixes=["K04"])
    return only


def test_the_same_on_both_sides_is_no_fault() -> None:
    seen = row({"status": 200, "sent": [{"params": None}, 1.5]})
    assert verdict(seen, seen).word == "same"


@pytest.mark.parametrize(
    ("stock", "patched", "where"),
    [
        ({"status": 200}, {"status": 500}, "status"),
        ({"told": []}, {"told": ["P"]}, "told"),
        ({"sent": [{"a": 1}]}, {"sent": [{"a": 2}]}, "sent[0] → a"),
        ({"sent": [1]}, {}, "sent"),
        ({}, {"sent": [1]}, "sent"),
        ({"sent": None}, {}, "sent"),
        ({}, {"sent": None}, "sent"),
        ({"busy": 1}, {"busy": True}, "busy"),
        ("lives", "the engine dies", ""),
        ([1, 2], [2, 1], "[0]"),
    ],
)
def test_a_difference_turns_it_red(stock: object, patched: object, where: str) -> None:
    found = verdict(row(stock), row(patched))
    assert found.word == "differs"
    assert found.differences[0].where == where
    assert found.faults


def test_a_fault_shows_where_long_texts_part() -> None:
    (fault,) = verdict(row("x" * 500 + "one"), row("x" * 500 + "other")).faults
    assert "one on stock" in fault
    assert "other on patched" in fault
    assert len(fault) < 200


@pytest.mark.parametrize(
    ("stock", "patched", "missing"),
    [
        (["a"], ["a"], []),
        (["a"], ["a", "b"], []),
        ([], ["b"], []),
        (["a", "a"], ["a"], ["a"]),
        (["a"], [], ["a"]),
    ],
)
def test_patched_may_have_more_of_what_is_good_and_never_less(
    stock: list[str], patched: list[str], missing: list[str]
) -> None:
    found = differences({"told": {"at least": stock}}, {"told": {"at least": patched}})
    assert [one.stock for one in found] == missing


def test_a_limit_on_one_side_only_is_a_difference() -> None:
    assert [*differences({"at least": ["a"]}, ["a"])]


def test_of_what_was_exchanged_every_reading_counts() -> None:
    good = {"own": [1], "other's": [1]}
    assert verdict(row(good), row(good)).word == "same"
    (fault,) = verdict(row({"own": [1], "other's": "ValidationError"}), row(good)).faults
    assert fault.startswith("patched's, read by stock")
    (fault,) = verdict(row(good), row({"own": [1], "other's": [2]})).faults
    assert fault.startswith("stock's, read by patched")
    both = {"own": [1], "other's": "ValidationError"}
    assert len(verdict(row(both), row(both)).faults) == 2


CRASHED = row(crashed="Traceback ...\nTypeError: no such argument\n")


@pytest.mark.parametrize(
    ("stock", "patched", "sides"),
    [
        (CRASHED, CRASHED, ["stock", "patched"]),
        (CRASHED, row(1), ["stock"]),
        (row(1), CRASHED, ["patched"]),
    ],
)
def test_what_crashes_is_a_fault_even_on_both_sides(
    stock: dict[str, Any], patched: dict[str, Any], sides: list[str]
) -> None:
    found = verdict(stock, patched)
    assert found.word == "fault"
    assert found.faults == [f"it crashed on {side}: TypeError: no such argument" for side in sides]


def test_what_did_not_run_on_a_side_is_a_fault() -> None:
    assert verdict(row(1), None).faults == ["it did not run on the patched build"]
    assert verdict(None, row(1)).faults == ["it did not run on stock"]


def test_what_both_leave_out_is_told_with_the_reason() -> None:
    left_out = row(left_out="K04: stock asserts")
    found = verdict(left_out, left_out)
    assert (found.word, found.left_out, found.faults) == ("left out", "K04: stock asserts", [])


@pytest.mark.parametrize("other", [row(1), row(left_out="another reason")])
def test_what_one_side_leaves_out_is_a_fault(other: dict[str, Any]) -> None:
    left_out = row(left_out="K04: stock asserts")
    assert verdict(left_out, other).faults
    assert verdict(other, left_out).faults


def test_a_fix_that_does_not_exist_is_a_fault() -> None:
    strange = row(left_out="K99: stock asserts") | {"shows": ["K99"]}
    assert set(verdict(strange, strange).faults) == {"it names a fix K99, which there is not"}


def test_nothing_at_all_is_no_pass() -> None:
    with pytest.raises(CheckFailedError):
        compared({}, {}, fixes=[])


def test_rows_are_read_as_far_as_the_side_got(tmp_path: Path) -> None:
    file = tmp_path / "stock.jsonl"
    file.write_text(json.dumps(row(1)) + "\n" + '{"name": "cut')
    assert list(read_rows(file)) == [NAME]
    assert read_rows(tmp_path / "none.jsonl") == {}


def test_what_ends_the_process_on_both_sides_is_a_fault(tmp_path: Path) -> None:
    """The runner writes a row for each scenario before the first begins; a later one counts."""
    file = tmp_path / "stock.jsonl"
    begun = {"name": NAME, "crashed": "the process ended before it was over", "seconds": 0.0}
    file.write_text(json.dumps(begun) + "\n")
    seen = read_rows(file)
    (only,) = compared(seen, seen, fixes=[])
    assert [fault.partition(":")[0] for fault in only.faults] == [
        "it crashed on stock",
        "it crashed on patched",
    ]
    file.write_text(json.dumps(begun) + "\n" + json.dumps(row(1)) + "\n")
    assert read_rows(file)[NAME] == row(1)


class FakeEnvironment:
    release = "0.20.2"
    python = Path("python")
    install_into = Environment.install_into

    def variables(self, shadow: Path) -> dict[str, str]:
        return {"PYTHONPATH": str(shadow)}


def run_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, said: str) -> Any:  # noqa: ANN401
    def run(words: list[object], **_: object) -> CompletedProcess[str]:
        return CompletedProcess([], code, said, "it died here")

    monkeypatch.setattr(parity, "run", run)
    monkeypatch.setattr(parity, "REPORTS", tmp_path / "reports")
    environment: Any = FakeEnvironment()
    return parity._run(environment, {}, "stock", tmp_path, "nonsense", [])


def test_an_unknown_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError) as refused:
        run_side(tmp_path, monkeypatch, 3, "INFO hello\nendpoints.answers retries.sent_again\n")
    assert "nonsense" in refused.value.found
    assert "endpoints.answers, retries.sent_again" in refused.value.expected


def test_a_side_that_dies_leaves_its_words_and_frees_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_side(tmp_path, monkeypatch, -11, "") == {}
    assert "it died here" in (tmp_path / "reports" / "parity-0.20.2-stock.log").read_text()
    assert (tmp_path / "stock.ended").exists()


def test_clients_lie_behind_the_build_and_no_plugin_of_theirs_is_loaded() -> None:
    environment: Any = FakeEnvironment()
    found = parity.variables(environment, Path("site"), Path("clients"))
    assert found["PYTHONPATH"].split(os.pathsep) == ["site", "clients"]
    assert found["VLLM_PLUGINS"] == ""


def test_clients_are_installed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[object]] = []

    def run(words: list[object], **_: object) -> None:
        (tmp_path / "clients").mkdir()
        calls.append(words)

    monkeypatch.setattr("scripts.prove.environment.run", run)
    environment: Any = FakeEnvironment()
    for _ in range(2):
        assert parity._clients(environment, tmp_path / "clients") == tmp_path / "clients"
    (words,) = calls
    assert "--no-deps" in words
    assert any(str(word).startswith("smg-grpc-servicer==") for word in words)


def test_one_cause_does_not_fill_the_screen() -> None:
    found = Comparison(NAME, faults=[f"place {i}" for i in range(10)])
    lines = [*command._lines("0.20.2", found)]
    assert len(lines) == 4
    assert lines[-1].endswith("… and 7 more")


def test_the_table_takes_names_and_faults_as_they_are() -> None:
    named = Comparison("retries.sent_again[other, /v1/completions]", faults=["[/v1] differs"])
    table = command._table("0.20.2", [named, Comparison(NAME, left_out="no [/x]")])
    out.print(table)


def test_the_report_has_every_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "REPORTS", tmp_path)
    parity.write_report("0.20.2", [verdict(row({"a": 1}), row({"a": 2}))])
    report = json.loads((tmp_path / "parity-0.20.2.json").read_text())
    assert report["scenarios"][NAME]["verdict"] == "differs"
    assert report["scenarios"][NAME]["differences"] == [{"where": "a", "stock": 1, "patched": 2}]

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from scripts.patchset.registry import Unpatched
from scripts.project import ROOT, project
from scripts.prove import record as module
from scripts.prove.outcomes import Outcome
from scripts.prove.record import Proof, document_of, keep, of_fix, proofs, record
from scripts.system.errors import UsageError
from tests.scripts import toys

TEST = "tests/regressions/test_1.py"
OTHER = "tests/regressions/test_2.py"
PASSED = Outcome("passed")
FAILED = Outcome("failed", f"{TEST}:7", "assert 1 == 2", "test")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty place for records, which is not made yet."""
    folder = tmp_path / "records" / "proofs"
    monkeypatch.setattr(module, "FOLDER", folder)
    return folder


@pytest.mark.usefixtures("folder")
class TestRecord:
    def test_gives_back_what_a_run_has_shown_of_each_fix(self) -> None:
        nodes = {f"{TEST}::test_a": FAILED, f"{TEST}::test_b[x]": PASSED, OTHER: PASSED}
        keys = [(fix, f"key of {fix.id}") for fix in (toys.fix("1"), toys.fix("2"))]
        record("0.20.2", "stock", keys, nodes)
        assert proofs("0.20.2") == {
            ("1", "stock"): Proof(
                "key of 1", {f"{TEST}::test_a": FAILED, f"{TEST}::test_b[x]": PASSED}
            ),
            ("2", "stock"): Proof("key of 2", {OTHER: PASSED}),
        }
        assert proofs("0.20.1") == {}

    def test_replaces_the_side_of_a_fix_and_nothing_else(self) -> None:
        one, two = toys.fix("1"), toys.fix("2")
        record("0.20.2", "stock", [(one, "old"), (two, "b")], {TEST: FAILED, OTHER: PASSED})
        record("0.20.2", "patched", [(one, "c")], {TEST: PASSED})
        record("0.20.2", "stock", [(one, "new")], {OTHER: FAILED})
        assert proofs("0.20.2") == {
            ("1", "stock"): Proof("new", {}),
            ("1", "patched"): Proof("c", {TEST: PASSED}),
            ("2", "stock"): Proof("b", {OTHER: PASSED}),
        }

    def test_leaves_out_what_chance_puts_into_an_outcome(self) -> None:
        failed = Outcome("failed", "vllm/a.py:7", "OSError: no /tmp/x/log at 0x7f0a", "release")
        record("0.20.2", "stock", [(toys.fix("1"), "key")], {TEST: failed})
        kept = proofs("0.20.2")["1", "stock"].outcomes[TEST]
        assert kept == replace(failed, message="OSError: no <path> at <address>")

    def test_keeps_what_a_run_of_a_fix_alone_has_left(self) -> None:
        alone = {"alone": {"inputs": {"1": "key"}}}
        keep("0.20.2", {"1": alone})
        assert proofs("0.20.2") == {}
        record("0.20.2", "stock", [(toys.fix("1"), "key")], {})
        assert document_of("0.20.2")["1"] == {**alone, "stock": {"inputs": "key", "outcomes": {}}}


def test_a_record_is_text_in_an_order_of_its_own(folder: Path) -> None:
    """So that each run of the same code leaves the same bytes, and a merge has lines to go by."""
    keep("0.20.2", {"2": {}, "1": {"stock": {"outcomes": {}, "inputs": "key"}}})
    assert [path.name for path in folder.iterdir()] == ["0.20.2.json"]
    lines = (folder / "0.20.2.json").read_text(encoding="utf-8").splitlines(keepends=True)
    assert lines == [
        "{\n", ' "1": {\n', '  "stock": {\n', '   "inputs": "key",\n', '   "outcomes": {}\n',
        "  }\n", " },\n", ' "2": {}\n', "}\n",
    ]  # fmt: skip


def test_a_record_that_is_no_json_is_refused_with_a_way_out(folder: Path) -> None:
    folder.mkdir(parents=True)
    path = folder / "0.20.2.json"
    path.write_text("<<<<<<< ours\n{}\n")
    with pytest.raises(UsageError, match=r"0\.20\.2\.json is no JSON") as caught:
        proofs("0.20.2")
    assert f"git checkout {path};" in caught.value.next_step
    assert caught.value.next_step.endswith("nox -s status -- --prove 0.20.2")


def test_this_repository_has_proofs_of_its_releases() -> None:
    release = project().default_release
    assert (ROOT / "records" / "proofs" / f"{release}.json").is_file()
    assert {side for _, side in proofs(release)} == {"stock", "patched"}


def test_of_a_fix_are_its_own_tests_but_for_those_left_open() -> None:
    part = Unpatched("==0.20.2", "nobody can meet it", [f"{TEST}::test_a", f"{TEST}::test_b"])
    fix = toys.fix("1", tests=(TEST, OTHER), unpatched=(part,))
    open_there = {f"{TEST}::test_a": FAILED, f"{TEST}::test_b[x]": FAILED}
    rest = {f"{TEST}::test_ab": PASSED, f"{OTHER}::test_a": PASSED}
    nodes = {**open_there, **rest, "tests/regressions/test_10.py::test_a": FAILED}
    assert of_fix(fix, "0.20.2", nodes) == rest
    assert of_fix(fix, "0.21.0", nodes) == {**open_there, **rest}

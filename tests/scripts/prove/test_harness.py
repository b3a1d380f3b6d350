"""A harness failure is never a defect: the real plugin over toy tests, judged as a session is.

Each toy is a test module, a helper and a release called `vllm`; pytest runs it twice, with the
release as stock and as patched have it.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.project import ROOT
from scripts.prove.outcomes import Outcome, outcomes_of
from scripts.prove.pytest import RAISED
from scripts.prove.regressions import Verdict, _faults
from scripts.prove.stock import Stock, judge
from tests.scripts import toys

FILE = "tests/regressions/test_1.py"

RELEASE = """
def answer():
    return {answer}

def dies():
    if answer() != 42:
        raise KeyError("P")

def calls(function):
    return function()
"""

HELPER = """
import subprocess
import vllm
from tests.support.harness import HarnessError, building

class EngineDied(Exception):
    pass

def start(program):
    try:
        subprocess.Popen([program])
    except OSError as error:
        raise HarnessError(f"no process: {error}", f"{program} to start") from error

def start_without_a_word(program):
    subprocess.Popen([program])

def check():
    assert vllm.answer() == 42

def let_it_die():
    try:
        vllm.dies()
    except Exception as error:
        raise EngineDied("the engine dies") from error

def scripted():
    raise HarnessError("an unknown call", "one of the script")

@building("a worker")
def build():
    vllm.dies()
"""

HEAD = "import pytest, vllm\nimport helper\n\n"
BROKEN_PROGRAM = 'helper.start("/no/such/program")'


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder from which `tests.support` is imported, and no more of the repository."""
    folder = tmp_path_factory.mktemp("stage")
    (folder / "tests").mkdir()
    (folder / "tests" / "support").symlink_to(ROOT / "tests" / "support")
    return folder


def run(folder: Path, stage: Path, test: str, answer: int) -> dict[str, Outcome]:
    """Run the toy `test` on a release that answers so."""
    (folder / "tests" / "regressions").mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_text(HEAD + test)
    (folder / "tests" / "helper.py").write_text(HELPER)
    (folder / "vllm.py").write_text(RELEASE.format(answer=answer))
    log = folder / "log.jsonl"
    subprocess.run(
        [
            sys.executable, "-B", "-m", "pytest", "-q", "-p", RAISED, "-p", "no:cacheprovider",
            *toys.FEWER_PLUGINS,
            "--rootdir", folder, "--report-log", log, folder / FILE,
        ],
        cwd=folder,
        env={"PYTHONPATH": f"{stage}:{folder}:{folder / 'tests'}", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        timeout=60,
    )  # fmt: skip
    return outcomes_of(log, folder)


def session(folder: Path, stage: Path, test: str) -> tuple[dict[str, Outcome], list[str]]:
    """Return what a toy's test came to on stock, and the faults of the session."""
    fix = toys.fix("1", tests=(FILE,))
    registry = toys.registry(fix)
    stock, patched = (run(folder, stage, test, answer) for answer in (41, 42))
    verdict = Verdict("1", True, stock, patched, patched)
    return stock, list(_faults(verdict, [fix], "0.20.2", registry))


def in_a_test(line: str) -> str:
    return f"def test():\n    {line}\n"


EVIDENCE = {
    "assert": in_a_test("assert vllm.answer() == 42"),
    "assert on what a helper saw": in_a_test("assert vllm.calls(vllm.answer) == 42"),
    "Failed": in_a_test("vllm.answer() == 42 or pytest.fail('another answer')"),
    "assert that the release calls": (
        "def check():\n    assert vllm.answer() == 42\n\n" + in_a_test("vllm.calls(check)")
    ),
    "a library asserts": (
        "from unittest import mock\n\n"
        + in_a_test("seen = mock.Mock()\n    seen(vllm.answer())\n    seen.assert_called_with(42)")
    ),
}


@pytest.mark.parametrize("name", EVIDENCE)
def test_an_assertion_of_the_tests_own_file_shows_the_defect(
    name: str, tmp_path: Path, python: Path
) -> None:
    stock, faults = session(tmp_path, python, EVIDENCE[name])
    assert [outcome.raised for outcome in stock.values()] == ["test"]
    assert faults == []
    assert judge(toys.fix("1", tests=(FILE,)), "0.20.2", stock) is Stock.FAILS


HARNESS = {
    "a process that does not start": in_a_test(BROKEN_PROGRAM),
    "in words of its own": in_a_test("helper.start_without_a_word('/no/such/program')"),
    "swallowed, then asserted upon": in_a_test(
        f"try:\n        {BROKEN_PROGRAM}\n    except RuntimeError as error:\n"
        "        assert 'refused' in str(error)"
    ),
    "called by the release": in_a_test("vllm.calls(helper.scripted)"),
    "in set-up": (
        f"@pytest.fixture\ndef server():\n    {BROKEN_PROGRAM}\n\n"
        "def test(server):\n    assert vllm.answer() == 42\n"
    ),
    "assertion in set-up": (
        "@pytest.fixture\ndef server():\n    assert 1 == 2\n\n"
        "def test(server):\n    assert vllm.answer() == 42\n"
    ),
    "in tear-down": (
        f"@pytest.fixture\ndef server():\n    yield\n    {BROKEN_PROGRAM}\n\n"
        "def test(server):\n    assert vllm.answer() == 42\n"
    ),
    "in collection": "import no_such_module\n" + in_a_test("assert vllm.answer() == 42"),
    "of the test itself": in_a_test("vllm.no_such_name()"),
}


@pytest.mark.parametrize("name", HARNESS)
def test_a_broken_harness_turns_the_session_red_on_both_sides(
    name: str, tmp_path: Path, python: Path
) -> None:
    stock, faults = session(tmp_path, python, HARNESS[name])
    assert {(outcome.result, outcome.raised) for outcome in stock.values()} == {
        ("error", "harness")
    }
    for side in ("stock", "patched"):
        [said] = [fault for fault in faults if fault.startswith(f"1, {side}: {FILE}")]
        assert "error, expected " in said
        assert "says nothing of the release" in said
        assert "nox -s regressions -- 0.20.2 --fix 1" in said
    assert judge(toys.fix("1", tests=(FILE,)), "0.20.2", stock) is Stock.UNKNOWN


def test_the_message_names_what_was_found_and_what_was_expected(
    tmp_path: Path, python: Path
) -> None:
    _, faults = session(tmp_path, python, HARNESS["a process that does not start"])
    assert f"{FILE}::test error" in faults[0]
    assert "helper.py:" in faults[0]
    assert "no process: " in faults[0]
    assert "; expected /no/such/program to start" in faults[0]


def test_one_broken_test_beside_a_good_one_is_enough(tmp_path: Path, python: Path) -> None:
    both = EVIDENCE["assert"] + "\ndef test_too():\n    " + BROKEN_PROGRAM + "\n"
    stock, faults = session(tmp_path, python, both)
    assert sorted(outcome.raised for outcome in stock.values()) == ["harness", "test"]
    assert len([fault for fault in faults if "::test_too error" in fault]) == 3  # and alone
    assert judge(toys.fix("1", tests=(FILE,)), "0.20.2", stock) is Stock.UNKNOWN


@pytest.mark.parametrize("line", ["helper.check()", "helper.build()"])
def test_what_a_helper_asserts_or_cannot_build_is_no_evidence(
    line: str, tmp_path: Path, python: Path
) -> None:
    """It holds on patched, so that stock's failure alone would look like the defect."""
    stock, faults = session(tmp_path, python, in_a_test(line))
    assert [(outcome.result, outcome.raised) for outcome in stock.values()] == [
        ("error", "harness")
    ]
    assert any(fault.startswith(f"1, stock: {FILE}::test error") for fault in faults)
    [said] = [fault for fault in faults if "no test fails on stock" in fault]
    assert "found error (harness)" in said
    assert "nox -s regressions -- 0.20.2 --fix 1" in said


@pytest.mark.parametrize("line", ["vllm.dies()", "helper.let_it_die()"])
def test_an_exception_of_the_releases_own_fails_a_test_and_shows_no_behaviour(
    line: str, tmp_path: Path, python: Path
) -> None:
    stock, faults = session(tmp_path, python, in_a_test(line))
    assert [(outcome.result, outcome.raised) for outcome in stock.values()] == [
        ("failed", "release")
    ]
    [said] = faults
    assert "no test fails on stock by an assertion" in said
    assert "found failed (release)" in said
    beside, faults = session(
        tmp_path, python, EVIDENCE["assert"] + f"\ndef test_too():\n    {line}\n"
    )
    assert faults == []
    assert sorted(outcome.raised for outcome in beside.values()) == ["release", "test"]


def test_no_helper_asserts_on_a_tests_behalf() -> None:
    """What lies in tests/pd/plugin runs within the server."""
    folders = [ROOT / "tests" / name for name in ("support", "programs", "parity", "pd")]
    helpers = [
        path
        for folder in folders
        for path in folder.glob("*.py")
        if not path.name.startswith("test_")
    ]
    assert len(helpers) > 20
    asserting = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in helpers
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assert)
        or (isinstance(node, ast.Raise) and "AssertionError" in ast.unparse(node))
    ]
    assert asserting == []

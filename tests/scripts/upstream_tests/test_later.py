"""Forward tests: what the registry lists is written, named and judged."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.patchset.registry import LaterTest, Registry, load_registry
from scripts.project import project
from scripts.prove.outcomes import Outcome
from scripts.upstream_tests import later as forward_tests
from scripts.upstream_tests.later import ForwardTest
from tests.scripts import toys
from tests.scripts.patchset.test_registry import ENTRY, HEAD, faults
from tests.scripts.repos import write

PATH = "tests/unit/test_it.py"
PARAMETERS = "import pytest\n\n@pytest.mark.parametrize('n', [1, 2, 3])\n"
TREES = {
    "0.20.2": {PATH: "def helper():\n    return 1\n", "vllm/__init__.py": ""},
    "0.21.0": {PATH: f"{PARAMETERS}def test_it(n):\n    assert n == helper()\n"},
    "0.22.0": {
        PATH: f"{PARAMETERS}def test_it(n):\n    assert n\n\n"
        "def test_around():\n    def test_inner(): ...\n\n"
        "class TestOf:\n    def test_one(self):\n        from vllm.gone import x\n"
    },
}
ASSERTION = "AssertionError: "


def later(release: str, name: str, **more: object) -> LaterTest:
    values = {"release": release, "test": f"{PATH}::{name}", "on": "<=0.21.0"} | more
    if "passes_on_stock" not in values:
        values.setdefault("fails_with", ASSERTION)
    return LaterTest(**values)  # type: ignore[arg-type]


def registry(*tests: LaterTest) -> Registry:
    return toys.registry(toys.fix("1"), toys.fix("2", forward_tests=tests))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Lay out the tests of the earliest release, and take all releases from small trees."""
    for release, files in TREES.items():
        write(tmp_path / release, files)
    write(tmp_path / "work", {PATH: TREES["0.20.2"][PATH]})
    monkeypatch.setattr(forward_tests, "release_tree", lambda release: tmp_path / release)
    return tmp_path / "work" / "tests"


def test_writes_what_is_listed_for_the_release_and_names_each_test(folder: Path) -> None:
    listed = registry(
        later("0.22.0", "test_it", parameters=("2", "3")),
        later("0.22.0", "test_it", parameters=("1",), passes_on_stock="one is right"),
        later("0.22.0", "test_around::test_inner"),
        later("0.21.0", "test_it", on="==0.20.*"),
        later("0.22.0", "test_it", on="==0.21.0"),  # of other releases
    )
    written = forward_tests.write("0.20.2", listed, folder)
    assert {node: (test.release, test.discriminates) for node, test in written.items()} == {
        "tests/unit/test_forward_0_22_0_it.py::test_it[2]": ("0.22.0", True),
        "tests/unit/test_forward_0_22_0_it.py::test_it[3]": ("0.22.0", True),
        "tests/unit/test_forward_0_22_0_it.py::test_it[1]": ("0.22.0", False),
        "tests/unit/test_forward_0_22_0_it.py::test_inner": ("0.22.0", True),
        "tests/unit/test_forward_0_21_0_it.py::test_it": ("0.21.0", True),
    }
    assert {test.fix for test in written.values()} == {"2"}
    files = sorted(path.name for path in (folder / "unit").iterdir())
    assert files == ["test_forward_0_21_0_it.py", "test_forward_0_22_0_it.py", "test_it.py"]
    one = (folder / "unit" / "test_forward_0_22_0_it.py").read_text()
    assert one.count("def test_it(") == 1
    assert "import helper" in (folder / "unit" / "test_forward_0_21_0_it.py").read_text()
    assert (folder / "forward_adapters.py").read_bytes() == forward_tests.ADAPTERS.read_bytes()


def test_an_outcome_belongs_to_its_parameters_or_to_the_whole_test(folder: Path) -> None:
    listed = registry(
        later("0.22.0", "test_it", parameters=("2",)), later("0.21.0", "test_it", on="==0.20.*")
    )
    written = forward_tests.write("0.20.2", listed, folder)
    start = "tests/unit/test_forward_0_2"
    assert forward_tests.owner(f"{start}1_0_it.py::test_it[7]", written) is not None
    assert forward_tests.owner(f"{start}2_0_it.py::test_it[2]", written) is not None
    assert forward_tests.owner(f"{start}2_0_it.py::test_it[1]", written) is None
    assert forward_tests.owner("tests/unit/test_it.py::test_it", written) is None


PASSED, FAILED = Outcome("passed"), Outcome("failed", "x.py:1", "AssertionError: assert 1 == 2")


@pytest.mark.parametrize(
    ("discriminates", "stock", "patched", "said"),
    [
        (True, FAILED, PASSED, ""),
        (True, FAILED, FAILED, "failed on patched: AssertionError: assert 1 == 2"),
        (True, PASSED, PASSED, "passed on stock, so it proves nothing"),
        (True, Outcome("skipped"), PASSED, "skipped on stock"),
        (True, Outcome("error", "x.py:1", "AssertionError: "), PASSED, "error on stock"),
        (
            True,
            Outcome("failed", "x.py:1", "TypeError: f() got an unexpected keyword argument"),
            PASSED,
            "fails on stock otherwise than with 'AssertionError: ': TypeError",
        ),
        (False, PASSED, PASSED, ""),
        (False, FAILED, PASSED, "failed on stock, where the registry says that it passes"),
        (False, PASSED, FAILED, "failed on patched"),
        (False, PASSED, Outcome("skipped"), "skipped on patched"),
    ],
)
def test_only_the_failure_that_is_named_counts(
    discriminates: bool, stock: Outcome, patched: Outcome, said: str
) -> None:
    test = ForwardTest("1", "0.22.0", f"{PATH}::test_it", discriminates, ASSERTION)
    fault = test.fault(stock, patched)
    assert fault.startswith(said) if said else fault == ""


def test_all_faults_of_the_list_are_found(folder: Path) -> None:
    listed = registry(
        later("0.22.0", "TestOf::test_one"),
        later("0.21.0", "test_gone", on="==0.20.2"),
        later("0.22.0", "test_it", on="==0.17.1"),
        later("0.22.0", "test_around::test_inner", on="==0.21.0", parameters=("1",)),
        later("0.22.0", "test_around::test_inner", on="==0.21.0", parameters=("1",)),
    )
    write(folder.parents[1], {f"{r}/vllm/__init__.py": "" for r in project().releases})
    found = "\n".join(forward_tests.registry_faults(listed))
    for said in (
        f"fix 2: {PATH}::test_it of 0.22.0 runs on no release",
        "0.20.2: forward tests of 0.22.0: tests/unit/test_it.py needs vllm.gone.x",
        f"0.20.2: forward tests of 0.21.0: the later release has no {PATH}::test_gone",
        "0.21.0: forward test tests/unit/test_forward_0_22_0_it.py::test_inner[1] is listed twice",
    ):
        assert said in found, f"{said}\n---\n{found}"


def test_the_registry_says_what_each_has_to_do(tmp_path: Path) -> None:
    table = '[[fix.forward-test]]\nrelease = "0.22.0"\ntest = "tests/x.py::test"\non = "<0.22"\n'
    path = tmp_path / "fixes.toml"
    path.write_text(f'{HEAD}{ENTRY}{table}fails-with = "assert"\nparameters = ["a"]\n')
    assert load_registry(path).fixes["1"].forward_tests == (
        LaterTest("0.22.0", "tests/x.py::test", "<0.22", "assert", parameters=("a",)),
    )
    for text, said in (
        (table, "exactly one of fails-with and passes-on-stock"),
        (f'{table}fails-with = "a"\npasses-on-stock = "b"\n', "exactly one of"),
        (f'{table}fails-with = "a"\nparameters = "b"\n', "parameters: text and lists"),
        (f'{table}fails-with = "a"\nadapters = [1]\n', "adapters: text and lists"),
        (f"{table}fails-with = 1\n", "text and lists"),
        (f'{table}fails-with = "a"\nwhy = "b"\n', "why"),
        (f'{table.replace("0.22.0", "next")}fails-with = "a"\n', "next"),
        (f'{table.replace("<0.22", "before")}fails-with = "a"\n', "before"),
        (f'{table.replace("::test", "")}fails-with = "a"\n', "names no function"),
    ):
        assert said in faults(tmp_path, HEAD + ENTRY + text)

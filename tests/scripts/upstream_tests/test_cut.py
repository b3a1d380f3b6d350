"""Cutting tests: what is cut out of one small tree runs under pytest in an earlier one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.system.errors import RegistryError
from scripts.upstream_tests.cut import MODULES, Cut, Wanted
from tests.scripts.repos import write

WORKER = "vllm/distributed/kv_transfer/kv_connector/v1/nixl"
TEST = "tests/unit/test_worker.py"
PACKAGES = {f"{p}/__init__.py": "" for p in ("tests", "tests/unit")} | {
    f"{parent}/__init__.py": "" for parent in map(str, Path(WORKER, "x").parents) if parent != "."
}
BASE = PACKAGES | {
    f"{WORKER}/worker.py": "class NixlConnectorWorker:\n    name = 'old'\n\nLIMIT = 1\n",
    "tests/adapters.py": "import pytest\n\n@pytest.fixture\ndef louder(monkeypatch):\n"
    f"    from {WORKER.replace('/', '.')} import worker\n"
    "    monkeypatch.setattr(worker, 'LIMIT', 2)\n",
    "tests/unit/utils.py": "def number():\n    return 1\n",
    TEST: "from .utils import number\n\nclass Fake:\n    side = 'base'\n\n"
    "def test_of_the_base():\n    assert False\n",
}
LATER = PACKAGES | {
    f"{WORKER}/base_worker.py": "class NixlBaseConnectorWorker:\n    name = 'new'\n\nLIMIT = 1\n",
    f"{WORKER}/extra.py": "def later(): ...\n",
    "tests/unit/utils.py": "import os\n\nSIZES = [1, 2]\n\n"
    "def number():\n    return 2\n\ndef sizes():\n    return os.path.basename('a/b'), SIZES\n",
    TEST: f'''\
import json
from contextlib import nullcontext as nothing
from unittest.mock import patch

import pytest

from {WORKER.replace("/", ".")} import base_worker
from {WORKER.replace("/", ".")}.base_worker import NixlBaseConnectorWorker
from {WORKER.replace("/", ".")}.extra import later

from .utils import number, sizes

STATES = ["on", "off"]
seen = []


class Fake:
    side = "later"


class Other(Fake):
    pass


@pytest.fixture(autouse=True)
def recorded():
    seen.append("fixture")


@pytest.fixture
def state():
    return json.loads('"on"')


@pytest.mark.parametrize("wanted", STATES)
def test_state(state, wanted):
    assert (state == wanted) is (wanted == "on")


def test_helpers():
    with nothing():
        assert number() == 1
    assert sizes() == ("b", [1, 2])
    assert seen[-1] == "fixture"


def test_fakes():
    assert (Fake.side, Other.side) == ("base", "base")


@patch("{WORKER.replace("/", ".")}.base_worker.LIMIT", 5)
def test_moved():
    from {WORKER.replace("/", ".")}.base_worker import LIMIT, NixlBaseConnectorWorker as Worker

    assert LIMIT == base_worker.LIMIT == 5
    assert Worker is NixlBaseConnectorWorker
    assert Worker.name == "old"


def test_adapted():
    assert base_worker.LIMIT == 2


def test_needs_what_came_later():
    later()


def test_needs_it_within():
    from {WORKER.replace("/", ".")}.base_worker import LATER


def test_around():
    def test_inner(self, state):
        assert state == "off"


class TestClass:
    SIZE = 3

    def helper(self):
        return self.SIZE

    def test_one(self):
        assert self.helper() == 3

    def test_two(self):
        assert self.helper() == 4
''',
}


@pytest.fixture
def trees(tmp_path: Path) -> tuple[Path, Path]:
    write(tmp_path / "later", LATER)
    write(tmp_path / "base", BASE)
    return tmp_path / "later", tmp_path / "base"


def cut(trees: tuple[Path, Path], *tests: Wanted) -> str:
    return Cut(*trees, TEST, adapters="tests.adapters").text(tests)


def ran(trees: tuple[Path, Path], *tests: Wanted) -> str:
    """Cut the tests, run them in the base tree, and return what pytest says of each."""
    (trees[1] / "tests/unit/test_cut.py").write_text(cut(trees, *tests))
    options = ("-q", "-rA", "-p", "no:cacheprovider", "--tb=line", "--disable-warnings")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "tests/unit/test_cut.py"],
        cwd=trees[1],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    return result.stdout + result.stderr


def test_brings_helpers_fixtures_and_constants_along_and_prefers_those_of_the_base(
    trees: tuple[Path, Path],
) -> None:
    names = ("test_state", "test_helpers", "test_fakes")
    said = ran(trees, *map(Wanted, names))
    for node in ("test_state[on]", "test_state[off]", "test_helpers", "test_fakes"):
        assert f"PASSED tests/unit/test_cut.py::{node}" in said, said
    assert "4 passed" in said, said  # and nothing of the base's own


def test_calls_what_has_moved_by_its_earlier_name(trees: tuple[Path, Path]) -> None:
    assert f"{WORKER.replace('/', '.')}.base_worker" in MODULES
    assert "1 passed" in ran(trees, Wanted("test_moved"))


def test_leaves_names_alone_that_the_base_has_already(trees: tuple[Path, Path]) -> None:
    write(trees[1], {f"{WORKER}/base_worker.py": LATER[f"{WORKER}/base_worker.py"]})
    assert "assert 'new' == 'old'" in ran(trees, Wanted("test_moved"))


def test_runs_under_the_adapters_that_are_named(trees: tuple[Path, Path]) -> None:
    assert "1 failed" in ran(trees, Wanted("test_adapted"))
    assert "1 passed" in ran(trees, Wanted("test_adapted", ("louder",)))


def test_takes_single_methods_of_a_class_and_what_they_need(trees: tuple[Path, Path]) -> None:
    said = ran(trees, Wanted("TestClass::test_one"))
    assert "PASSED tests/unit/test_cut.py::TestClass::test_one" in said, said
    assert "1 passed" in said
    both = ran(trees, Wanted("TestClass::test_one"), Wanted("TestClass::test_two"))
    assert "1 failed, 1 passed" in both


def test_makes_a_test_that_stands_in_another_run_for_the_first_time(
    trees: tuple[Path, Path],
) -> None:
    said = ran(trees, Wanted("test_around::test_inner"))
    assert "FAILED tests/unit/test_cut.py::test_inner" in said, said
    assert "assert 'on' == 'off'" in said, said


@pytest.mark.parametrize(
    ("test", "missing"),
    [("test_needs_what_came_later", "nixl.extra.later"), ("test_needs_it_within", "worker.LATER")],
)
def test_refuses_what_the_base_does_not_have(
    trees: tuple[Path, Path], test: str, missing: str
) -> None:
    with pytest.raises(RegistryError) as caught:
        cut(trees, Wanted(test))
    assert missing in caught.value.found


@pytest.mark.parametrize(
    "name", ["test_gone", "TestClass::test_gone", "Fake", "TestGone::test_one"]
)
def test_says_which_test_does_not_exist(trees: tuple[Path, Path], name: str) -> None:
    with pytest.raises(RegistryError) as caught:
        cut(trees, Wanted(name))
    assert f"{TEST}::{name}" in caught.value.found


def test_says_where_the_text_comes_from(trees: tuple[Path, Path]) -> None:
    assert cut(trees, Wanted("test_fakes")).startswith(
        f"# Cut by kvfix at run time out of vLLM's {TEST}"
    )

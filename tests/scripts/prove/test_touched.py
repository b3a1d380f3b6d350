"""Which tests a fix can touch: what the plugin notes, and what is read of a change."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.project import ROOT
from scripts.prove.outcomes import Outcome
from scripts.prove.touched import PLUGIN, PROCESS, Entered, ReachesFurtherError, changes

VLLM = """\
import functools
import subprocess
import sys
from dataclasses import dataclass

def wrapped(function):
    return functools.wraps(function)(lambda *words: function(*words))

class Base:
    def inherited(self):
        return 1

class Derived(Base):
    @wrapped
    def own(self):
        return function()

    @classmethod
    def made(cls):
        return cls()

@dataclass
class Data:
    number: int = 1

def function():
    def inner():
        return 2
    return inner()

def begins():
    subprocess.run([sys.executable, "-c", ""], check=True)
"""

TESTS = """\
import threading
from vllm.a import Base, Data, Derived, begins, function

function()

def test_none(): pass
def test_function(): function()
def test_inherited(): Derived().inherited()
def test_own(): Derived().own()
def test_made(): Derived.made()
def test_data(): Data()
def test_process(): begins()
def test_thread():
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()
"""


@pytest.fixture(scope="module")
def entered(tmp_path_factory: pytest.TempPathFactory) -> Entered:
    """Return what was noted of these tests."""
    folder = tmp_path_factory.mktemp("entered")
    (folder / "vllm").mkdir()
    (folder / "vllm" / "__init__.py").touch()
    (folder / "vllm" / "a.py").write_text(VLLM)
    (folder / "test_a.py").write_text(TESTS)
    words = ["-q", "-p", "no:cacheprovider", "-p", PLUGIN, "--entered", "seen.json", "test_a.py"]
    path = os.pathsep.join(map(str, (folder, ROOT)))
    subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        check=True,
        capture_output=True,
    )
    seen = json.loads((folder / "seen.json").read_text())
    passed = dict.fromkeys(seen, Outcome("passed"))
    return Entered.read(folder / "seen.json", passed, passed)


def line(of: str) -> int:
    return VLLM.splitlines().index(of) + 1


FUNCTION, INNER = (f"vllm/a.py:{line(of)}" for of in ("def function():", "    def inner():"))
OWN, INHERITED = (f"vllm/a.py:{line(of)}" for of in ("    @wrapped", "    def inherited(self):"))


@pytest.mark.parametrize(
    ("test", "names"),
    [
        ("none", set()),
        ("function", {FUNCTION, INNER}),
        ("thread", {FUNCTION, INNER}),
        ("inherited", {INHERITED, "vllm.a:Base", "vllm.a:Derived"}),
        ("own", {OWN, FUNCTION, INNER, "vllm.a:Base", "vllm.a:Derived"}),
        ("data", {"vllm.a:Data"}),
        ("process", {PROCESS}),
    ],
)
def test_what_a_test_enters_is_noted(entered: Entered, test: str, names: set[str]) -> None:
    found = entered.by_test[f"test_a.py::test_{test}"]
    assert names <= found
    others = {FUNCTION, INNER, OWN, INHERITED, "vllm.a:Base", "vllm.a:Derived", PROCESS} - names
    assert found.isdisjoint(others)


def after(old: str, new: str) -> str:
    assert VLLM.count(old) == 1
    return VLLM.replace(old, new)


@pytest.mark.parametrize(
    ("old", "new", "touched"),
    [
        ("return 2", "return 3", {"function", "own", "thread"}),
        ("    return inner()", "    return inner() + 1", {"function", "own", "thread"}),
        ("return 1", "return 3", {"inherited"}),
        ("    @wrapped", "    @wrapped\n    @wrapped", {"own"}),
        ("class Derived(Base):", "class Derived(Base, Data):", {"inherited", "own", "made"}),
        ("        return 1\n", "        return 1\n\n    def new(self): ...\n",
         {"inherited", "own", "made"}),
        ("import sys\n", "import sys\nfrom vllm_overlay.a import (\n    new,\n)\n", set()),
        ("def begins():\n", "def begins():\n    from a import function\n", set()),
    ],
)  # fmt: skip
def test_a_change_touches_who_enters_it(
    entered: Entered, old: str, new: str, touched: set[str]
) -> None:
    changed = frozenset(changes("vllm/a.py", VLLM, after(old, new)))
    found = entered.touched(entered.by_test, changed)
    names = {test.rpartition("_")[2] for test in found}
    assert names == {*touched, "process", "none"}, "of what nothing is known, too"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("def function():", "def function(more=1):"),
        ("def wrapped(function):", "def wrapped(\n    function,\n    more=1,\n):"),
        ("import sys\n", "import sys\nLIMIT = 1\n"),
        ("import sys\n", "from a import sys\n"),
        ("import sys\n", "import sys\nfrom a import (\n    new,\n    begins,\n)\n"),
        ("import sys\n", "import sys\nfrom a import print\n"),
        ("import sys\n", ""),
        ("    number: int = 1", "    number: int = 2"),
        ("@dataclass\n", "@dataclass\n@wrapped\n"),
        ("class Base:", "class Base(metaclass=Meta):"),
        ("class Base:", "class Base(Struct):"),
        ("class Base:", "@wrapped\nclass Base:"),
    ],
)
def test_of_some_changes_nobody_can_say_who_enters_them(old: str, new: str) -> None:
    with pytest.raises(ReachesFurtherError):
        list(changes("vllm/a.py", VLLM, after(old, new)))


def test_what_nothing_is_known_of_is_touched(tmp_path: Path) -> None:
    stock = {"a": Outcome("failed"), "b": Outcome("failed"), "c": Outcome("passed")}
    nothing = Entered.read(tmp_path / "not there.json", {}, stock)
    assert nothing.touched(["a"], frozenset()) == {"a"}
    seen = tmp_path / "seen.json"
    seen.write_text(json.dumps({"a": ["f"], "b": ["g"], "c": ["g"]}))
    known = Entered.read(seen, stock, stock)
    assert known.touched(stock, None) == {"a", "b", "c"}
    assert known.touched(stock, frozenset("f")) == {"a"}
    otherwise = Entered.read(seen, {**stock, "c": Outcome("failed")}, stock)
    assert otherwise.touched(stock, frozenset("f")) == {"a", "c"}, "traced it does something else"

"""What of the code below tests/ counts for a test: never less than what runs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from scripts.prove.reach import Sources, Unit
from tests.scripts.repos import write

TEST = "tests/regressions/test_it.py"
PLUGIN = "tests.support.plugin"
FILES = {
    TEST: '''
"""What the test is about; see `tests.support.elsewhere`."""

from __future__ import annotations

import pytest

from tests.support import alias, patched
from tests.support.helper import LIMITS, Engine, check, worker


@pytest.fixture
def engine(worker: object) -> Engine:
    return Engine(worker)


@pytest.mark.parametrize("limit", LIMITS)
def test_it(engine: Engine, limit: int, monkeypatch: pytest.MonkeyPatch, shared: int) -> None:
    from tests.support.late import late

    monkeypatch.setattr(patched, "one", lambda: 3)
    monkeypatch.setattr("tests.support.named.value", 4)
    assert check(engine.run(limit)) + alias.add(late(), shared) == 5
''',
    "tests/conftest.py": """
import pytest

from tests.support.helper import shared_value


@pytest.fixture
def shared():
    return shared_value()
""",
    "tests/support/plugin.py": """
import os


def prepare():
    os.environ.setdefault("X", "1")


prepare()
""",
    "tests/support/helper.py": '''
"""Helps."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field

import pytest

from tests.support import patched
from tests.support.again import passed_on
from tests.support.runner import run_program

LIMITS = [1, 2]
"""What is tried."""

UNUSED = 7
computed = len("abc")


def shared_value() -> int:
    return len([])


def of_import() -> int:
    return 1


AT_IMPORT = of_import()


@pytest.fixture
def worker() -> object:
    return object()


@dataclass
class Base:
    engine: object
    calls: list[int] = field(default_factory=list)

    def run(self, limit: int) -> int:
        return getattr(self, f"_run_{len('one')}")(limit)


class Engine(Base):
    def _run_3(self, limit: int) -> int:
        with scope():
            return passed_on(limit) - limit + patched.one()


@contextlib.contextmanager
def scope():
    yield


def check(value: int) -> int:
    """Check it."""
    assert value == 3  # as said
    run_program()
    return value


def nobody(value: int) -> int:
    return nobody_else(value)


def nobody_else(value: int) -> int:
    return json.loads(str(value))
''',
    "tests/support/runner.py": """
import subprocess
import sys
from pathlib import Path


def run_program():
    script = Path(__file__).parent.parent / "programs" / "program.py"
    subprocess.run([sys.executable, str(script)], check=True)
""",
    "tests/support/again.py": "from tests.support.deep import passed_on\n",
    "tests/support/deep.py": """
def passed_on(value, extra=0):
    return inner(value) + extra


def inner(value):
    return value


def apart(value):
    return value
""",
    "tests/support/patched.py": """
def one():
    return 1


def two():
    return 2
""",
    "tests/support/alias.py": """
def add(one, two):
    return one + two


def subtract(one, two):
    return one - two
""",
    "tests/support/late.py": """
def late():
    return 2


def later():
    return 3
""",
    "tests/support/named.py": "value = 1\n\n\ndef function():\n    return value\n",
    "tests/support/elsewhere.py": "x = 1\n",
    "tests/programs/program.py": '''
"""Runs by itself."""


def main():
    print(1)


main()
''',
}

UNREACHED = {
    ("helper", "UNUSED"), ("helper", "nobody"), ("helper", "nobody_else"), ("deep", "apart"),
    ("alias", "subtract"), ("late", "later"),
}  # fmt: skip


def reached(folder: Path) -> dict[Unit, str]:
    return Sources(folder).reached([TEST], PLUGIN)


def text(folder: Path) -> str:
    return Sources(folder).text([TEST], PLUGIN)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, FILES)
    return tmp_path


def edit(folder: Path, name: str, *changes: tuple[str, str]) -> None:
    path = folder / "tests" / name
    content = path.read_text()
    for old, new in changes:
        assert content.count(old) == 1, old
        content = content.replace(old, new)
    path.write_text(content)


def test_everything_that_runs_is_reached_and_what_nobody_names_is_not(folder: Path) -> None:
    seen = folder / "seen.json"
    (folder / "tracing.py").write_text(
        f"""
import atexit, json, os, sys
SEEN = set()
def note(frame, event, argument):
    if event == "call" and frame.f_code.co_filename.startswith({str(folder / "tests")!r}):
        SEEN.add((frame.f_code.co_filename, frame.f_code.co_firstlineno))
sys.setprofile(note)
atexit.register(lambda: json.dump(sorted(SEEN), open({str(seen)!r}, "w")))
"""
    )
    subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-p", "tracing", "-p", PLUGIN,
            "-p", "no:cacheprovider", "--import-mode=importlib", "--rootdir", folder, folder / TEST,
        ],
        cwd=folder,
        env={"PYTHONPATH": str(folder), "PATH": ""},
        check=True,
        capture_output=True,
    )  # fmt: skip
    tests = Sources(folder)
    found = tests.reached([TEST], PLUGIN)
    ran = json.loads(seen.read_text())
    assert len(ran) > 20
    assert [row for row in ran if not _is_in(tests, found, Path(row[0]), row[1])] == []
    everything = {
        unit for path in {one.module for one in found} for unit in tests.module(path).units
    }
    left_out = {(unit.module.stem, unit.name) for unit in everything - found.keys()}
    assert left_out == UNREACHED


def _is_in(tests: Sources, found: Mapping[Unit, str], path: Path, line: int) -> bool:
    """Whether the function that begins at a line is in what was found."""
    module = tests.module(path)
    for name, statement in module.definitions.items():
        start = min(
            [statement.lineno, *(d.lineno for d in getattr(statement, "decorator_list", []))]
        )
        if start <= line <= (statement.end_lineno or line):
            return Unit(path, name) in found
    return Unit(path) in found


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("support/helper.py", "value == 3  # as said", "(\n        value == 3\n    )"),
        ("support/helper.py", '"""Check it."""', '"""Check it twice."""\n\n    # And again.'),
        ("support/helper.py", '"""What is tried."""', ""),
        ("support/helper.py", '"""Helps."""', ""),
        ("support/helper.py", "import contextlib\nimport json", "import json\nimport contextlib"),
        ("support/helper.py", "LIMITS = [1, 2]", "LIMITS = [\n    1,\n    2,\n]"),
        ("support/helper.py", "loads(str(value))", "loads(str(value + 1))"),
        ("support/helper.py", "UNUSED = 7\n", "UNUSED = 8\n\n\ndef new():\n    return 1\n\n\n"),
        ("support/deep.py", "def apart(value):\n    return value", ""),
        ("support/again.py", "from tests.support.deep import passed_on", "# It is there.\n"
         "from tests.support.deep import (\n    passed_on,\n)"),
        ("support/elsewhere.py", "x = 1", "x = 2"),
        ("programs/program.py", '"""Runs by itself."""', ""),
        ("regressions/test_it.py", '"""What the test', '"""Which the test'),
    ],
)  # fmt: skip
def test_a_tidy_up_changes_nothing(folder: Path, name: str, old: str, new: str) -> None:
    before = text(folder)
    edit(folder, name, (old, new))
    assert text(folder) == before


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("support/helper.py", "assert value == 3", "assert value >= 3"),
        ("support/helper.py", "LIMITS = [1, 2]", "LIMITS = [1, 2, 3]"),
        ("support/helper.py", 'computed = len("abc")', 'computed = len("abcd")'),
        ("support/helper.py", "int:\n    return 1", "int:\n    return 2"),
        ("support/helper.py", "class Engine(Base)", "class Engine(Base, object)"),
        ("support/helper.py", "calls: list[int]", "called: list[int]"),
        ("support/helper.py", "    yield\n", "    yield 1\n"),
        ("support/helper.py", "return object()", "return None"),
        ("support/helper.py", "return len([])", "return len([]) + 1"),
        ("support/helper.py", "@dataclass\n", "@dataclass(frozen=True)\n"),
        ("support/helper.py", "import json\n", "import json\nimport torch\n"),
        ("support/deep.py", "    return inner(value)", "    return inner(value) or inner(value)"),
        ("support/deep.py", "inner(value):\n    return value", "inner(value):\n    return +value"),
        ("support/deep.py", "extra=0", "extra=1"),
        ("support/patched.py", "return 2", "return 3"),  # it is handed to monkeypatch
        ("support/named.py", "return value", "return 1"),
        ("support/alias.py", "return one + two", "return two + one"),
        ("support/late.py", "return 2", "return 1 + 1"),
        ("support/plugin.py", '"1"', '"2"'),
        ("conftest.py", "return shared_value()", "return shared_value() + 0"),
        ("programs/program.py", "print(1)", "print(2)"),
        ("regressions/test_it.py", '"limit", LIMITS', '"limit", LIMITS[:1]'),
        ("regressions/test_it.py", "return Engine(worker)", "return Engine(None)"),
        ("regressions/test_it.py", "== 5", "!= 5"),
    ],
)  # fmt: skip
def test_what_can_change_an_outcome_counts(folder: Path, name: str, old: str, new: str) -> None:
    before = text(folder)
    edit(folder, name, (old, new))
    assert text(folder) != before


def test_moving_modules_changes_nothing(folder: Path) -> None:
    before = text(folder)
    (folder / "tests" / "support").rename(folder / "tests" / "fakes")
    for path in (folder / "tests").rglob("*.py"):
        path.write_text(path.read_text().replace("tests.support", "tests.fakes"))
    assert Sources(folder).text([TEST], "tests.fakes.plugin") == before


def test_an_exchange_of_two_functions_of_one_name_counts(folder: Path) -> None:
    write(
        folder,
        {
            TEST: "from tests.support.a import f\nfrom tests.support.b import f as g\n\n\n"
            "def test() -> None:\n    assert f() < g()\n",
            "tests/support/a.py": "def f():\n    return 1\n",
            "tests/support/b.py": "def f():\n    return 2\n",
        },
    )
    before = text(folder)
    edit(folder, "regressions/test_it.py", ("support.a", "support.x"), ("support.b", "support.a"))
    edit(folder, "regressions/test_it.py", ("support.x", "support.b"))
    assert text(folder) != before


@pytest.mark.parametrize(
    "code",
    [
        "from tests.support.deep import *\n",
        "from tests.support import deep\n\nfunctions = vars(deep)\n",
        "from tests.support import deep\n\n\ndef test():\n    getattr(deep, 'in' + 'ner')(1)\n",
        "from tests.support import deep\n\n\ndef test():\n    deep.inner = len\n",
        "import importlib\n\n\ndef test():\n    importlib.import_module('tests.support.deep')\n",
        "from importlib import import_module\n\nimport_module(f'tests.support.{len([])}')\n",
        "pytest_plugins = ['tests.support.deep']\n",
        "import tests.support.deep\n\n\ndef test():\n    vars(tests.support.deep)\n",
        "import sys\n\nWORDS = [sys.executable, '-m', 'tests.support.deep', '--twice']\n",
        "SCRIPT = 'support/deep.py'\n",
        "COMMAND = 'python -m tests.support.deep --twice'\n",
        "from ..support import deep\n\nhelp(deep)\n",
    ],
)
def test_all_of_a_module_counts_where_the_code_does_not_say_what(folder: Path, code: str) -> None:
    (folder / TEST).write_text(code)
    found = {unit.name for unit in reached(folder) if unit.module.stem == "deep"}
    assert found == {"", "passed_on", "inner", "apart"}


@pytest.mark.parametrize(
    "code",
    [
        "def one():\n    return globals()['tw' + 'o']()\n",
        "def one():\n    return eval('tw' + 'o')()\n",
        "def one():\n    return vars()\n",
        "import sys\n\n\ndef one():\n    return sys.modules[__name__]\n",
        "from pathlib import Path\n\n\ndef one():\n    return Path(__file__)\n",
    ],
)
def test_all_of_a_module_counts_where_it_looks_at_itself(folder: Path, code: str) -> None:
    (folder / TEST).write_text("from tests.support.own import one\n\n\ndef test():\n    one()\n")
    (folder / "tests" / "support" / "own.py").write_text(f"{code}\n\ndef two():\n    return 1\n")
    assert "two" in {unit.name for unit in reached(folder) if unit.module.stem == "own"}


def test_what_comes_from_elsewhere_is_not_the_module_itself(folder: Path) -> None:
    """A helper that looks up upstream's module says nothing about our own."""
    (folder / TEST).write_text("from tests.support.own import one\n\n\ndef test():\n    one()\n")
    (folder / "tests" / "support" / "own.py").write_text(
        "import sys\n\nfrom tests.support.again import passed_on\nfrom upstream import Worker\n\n\n"
        "def one():\n    return sys.modules[Worker.__module__]\n\n\ndef two():\n    return 1\n"
    )
    assert "two" not in {unit.name for unit in reached(folder) if unit.module.stem == "own"}


def test_a_docstring_that_is_read_counts(folder: Path) -> None:
    edit(folder, "programs/program.py", ("print(1)", "print(__doc__)"))
    before = text(folder)
    edit(folder, "programs/program.py", ("Runs by itself", "Runs alone"))
    assert text(folder) != before


def test_a_file_beside_a_module_counts_where_it_is_named(folder: Path) -> None:
    data = folder / "tests" / "regressions" / "data.json"
    data.write_text("1")
    with (folder / TEST).open("a") as file:
        file.write('\nDATA = "data.json"\n')
    before = text(folder)
    data.write_text("2")
    assert text(folder) != before


def test_a_test_that_is_not_there_is_empty(folder: Path) -> None:
    found = Sources(folder).reached(["tests/regressions/test_gone.py::test"], PLUGIN)
    stems = {unit.module.stem for unit in found}
    assert {"conftest", "plugin"} <= stems
    assert not {"test_it", "test_gone"} & stems

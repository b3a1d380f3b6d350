"""Mutants of a toy: one that a test kills, one that survives, hangs, is not reached."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from scripts.commands import mutants
from scripts.mutants import run
from scripts.mutants.run import ALL, CORE, TOOLS, Chosen, Row, overlay_modules, that_test
from scripts.mutants.verdict import SHARE, Equivalent, Verdict, judge, read_equivalents
from scripts.patchset.series import load_series
from scripts.project import ROOT
from scripts.system.errors import CheckFailedError, RegistryError, UsageError
from tests.programs.mutants.operators import mutants_of
from tests.scripts import toys

TOY = """
    \"\"\"A toy.\"\"\"

    import functools
    import logging
    import types
    from typing import cast

    logger = logging.getLogger("toy")
    LIMITS = {"small": 3}
    NUMBERS = int | float


    def is_small(number: int) -> bool:
        \"\"\"Whether it is.\"\"\"
        assert number >= 0
        logger.info("asked for %d", number)
        return number < LIMITS["small"]


    def counts_down(number: int, step: int = 1) -> int:
        while number > 0:
            number -= step
        return number


    def never_called(number: int) -> int:
        return number + 1


    def doubled(function):
        @functools.wraps(function)
        def wrapper(number):
            result = function(number)
            if result:
                result = result * 2
            return result

        return wrapper


    @doubled
    def same(number):
        return number


    @types.coroutine
    def awaited(number):
        yield number


    class Base:
        def word(self) -> str:
            return "base"


    class Derived(Base):
        def word(self) -> str:
            return super().word() + cast("str", "!")
"""

TESTS = """
    import toy
    from toy import LIMITS, awaited, counts_down, is_small, same  # bound before there is a mutant


    def test_small():
        assert is_small(2)
        assert not is_small(9)


    def test_limits():
        assert LIMITS == {"small": 3}


    def test_down():
        assert counts_down(3) == 0


    def test_doubled():
        assert same(2) == 4


    def test_awaited():
        async def asks():
            await awaited(3)

        assert asks().send(None) == 3


    def test_word():
        assert toy.Derived().word() == "base!"
"""


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "toy.py").write_text(dedent(TOY))
    (tmp_path / "test_toy.py").write_text(dedent(TESTS))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    return tmp_path


def tried(folder: Path, chosen: Chosen = ALL) -> list[Row]:
    command: list[str | Path] = [
        Path(sys.executable),
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        *toys.FEWER_PLUGINS,
        "--rootdir",
        folder,
    ]
    files, tests, out = {"toy": folder / "toy.py"}, [folder / "test_toy.py"], folder / "rows.jsonl"
    return run.rows_of(command, files, tests, 2, folder, {}, out, 2, chosen)


def verdicts(rows: list[Row]) -> dict[tuple[str, str], str]:
    return {(row["function"], row["change"]): row["verdict"] for row in rows if "change" in row}


def test_each_verdict(toy: Path) -> None:
    rows = tried(toy)

    found = verdicts(rows)
    assert rows[0]["failing"] == []
    assert [row for row in rows if row.get("fault")] == []
    smaller = "number < LIMITS['small'] -> number {} LIMITS['small']"
    assert found["is_small", smaller.format("<=")] == "survived"
    assert found["is_small", smaller.format(">=")] == "killed"
    assert found["LIMITS", "{'small': 3} -> {'small': 4}"] == "killed"
    assert found["NUMBERS", "NUMBERS = int | float -> NUMBERS = int & float"] == "killed"
    assert found["counts_down", "number -= step -> pass"] == "hung"
    assert found["counts_down", "number -= step -> number += step"] == "hung"
    head = "def counts_down(number: int, step: int={}) -> int:"
    assert found["counts_down", f"{head.format(1)} -> {head.format(0)}"] == "hung"
    assert found["counts_down", f"{head.format(1)} -> {head.format(2)}"] == "killed"
    assert {v for (name, _), v in found.items() if name == "never_called"} == {"not covered"}
    assert found["doubled.wrapper", "result * 2 -> result * 3"] == "killed"
    assert found["doubled.wrapper", "if result: -> if True:"] == "survived"
    assert found["doubled", "return wrapper -> return None"] == "import"
    word = "return super().word() + cast('str', '!')"
    assert found["Derived.word", f"{word} -> return None"] == "killed"


def test_only_some_are_tried_again(toy: Path) -> None:
    one = {"module": "toy", "function": "same", "change": "return number -> return None"}

    rows = tried(toy, Chosen(only=[one]))

    assert list(verdicts(rows).items()) == [((one["function"], one["change"]), "killed")]
    named = [Equivalent("toy", "is_small", "x -> y", "why")]
    assert judge("1.0", rows, named, whole=False).faults == []
    assert judge("1.0", rows, named).faults != []


def test_a_sample_is_that_of_its_seed(toy: Path) -> None:
    first, again, other = (
        verdicts(tried(toy, Chosen(sample=3, seed=seed))).keys() for seed in (1, 1, 2)
    )
    assert len(first) == 3
    assert first == again
    assert first != other


def test_a_test_that_fails_without_a_mutant_is_a_fault_and_kills_nothing(toy: Path) -> None:
    text = (toy / "test_toy.py").read_text()
    (toy / "test_toy.py").write_text(f"{text}\n\ndef test_bad():\n    assert is_small(8)\n")

    rows = tried(toy)

    assert rows[0]["failing"] == ["test_toy.py::test_bad"]
    assert any("test_bad fails without a mutant" in fault for fault in judge("", rows, []).faults)
    assert "survived" in verdicts(rows).values()


def test_a_failure_that_pytest_cannot_report_is_one(toy: Path) -> None:
    hook = "def pytest_runtest_makereport(call):\n    if call.excinfo:\n        raise SystemError\n"
    (toy / "conftest.py").write_text(hook)

    assert verdicts(tried(toy))["same", "return number -> return None"] == "killed"


def test_nothing_is_tried_where_the_tests_cannot_be_collected(toy: Path) -> None:
    (toy / "test_toy.py").write_text("import nowhere\n")

    with pytest.raises(CheckFailedError, match="nowhere"):
        tried(toy)


# ---------------------------------------------------------------- which changes there are


def changes(code: str) -> list[str]:
    return [mutant.change for mutant in mutants_of(ast.parse(dedent(code)))]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("return a < b", ["return None", "return a <= b", "return a >= b"]),
        ("return a == b", ["return None", "return a != b"]),
        ("return a and b", ["return None", "return a or b", "return b", "return a"]),
        ("f(not a)", ["pass", "f(a)"]),
        ("a = f(1)", ["pass", "f(2)", "f(0)"]),
        ("a = f(True)", ["pass", "f(False)"]),
        ("a = f('x', None)", ["pass", "f(None, 'x')", "f('', None)"]),
        ("return a - b", ["return None", "return a + b", "return a"]),
        ("return a | b", ["return None", "return a & b", "return a"]),
        ("return f(a, b)", ["return None", "return f(b, a)"]),
        ("return f(x=a)", ["return None", "return f()"]),
        ("return a[1:]", ["return None", "return a[:]", "return a[2:]", "return a[0:]"]),
        ("return min(a)", ["return None", "return max(a)"]),
        ("return a in (b, c)",
         ["return None", "return a not in (b, c)", "return a in (c,)", "return a in (b,)"]),
        ("return [a for a in b if a]",
         ["return None", "return [a for a in b if True]", "return [a for a in b if False]"]),
        ("return {'a': b}", ["return None", "return {}", "return {'': b}"]),
        ("f(a)", ["pass"]),
        ("del a[b]", ["pass"]),
        ("a.b = c", ["pass"]),
        ("a = c", ["pass"]),
        ("new = c", []),
        ("a += c", ["pass", "a -= c"]),
        ("raise E(a < b)", ["pass"]),
    ],
)  # fmt: skip
def test_changes_of_a_statement(line: str, expected: list[str]) -> None:
    found = changes(f"def f(a, b, c):\n    {line}\n")

    after = [change.partition(" -> ")[2].removeprefix("return ") for change in found]
    assert after == [each.removeprefix("return ") for each in expected]


def test_a_guard_is_removed_and_a_handler_passes_on() -> None:
    code = """
        def f(a, b):
            try:
                if a:
                    return
            except (KeyError, E) as error:
                g()
    """
    assert changes(code) == [
        "if a: -> if True:", "if a: -> if False:", "return -> pass",
        "except (KeyError, E) as error: -> except (KeyError, E) as error: raise",
        "(KeyError, E) -> (E,)", "(KeyError, E) -> (KeyError,)",
        "g() -> pass",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "line",
    [
        '"""Say it."""',
        "assert a > 1",
        'logger.warning("%s", a + 1)',
        'self.logger.warning("%s", a + 1)',
        "worker._log_failure('x', a)",
        "x: Literal[1, 2]",
        "from a import b",
    ],
)
def test_what_is_for_people_or_for_mypy_is_left_alone(line: str) -> None:
    assert changes(f"def f(a: int = None):\n    '''Doc.'''\n    {line}\n") == []


def test_the_same_change_twice_is_counted() -> None:
    assert changes("def f(a):\n    g(a)\n    g(a)\n") == ["g(a) -> pass", "g(a) -> pass (2)"]


# ---------------------------------------------------------------- what is made of it


def row(change: str, verdict: str) -> Row:
    return {"module": "m", "function": "f", "change": change, "line": 1, "verdict": verdict}


def said(survived: int, *named: str, of: int = 100) -> Verdict:
    rows: list[Row] = [{"tests": 1, "seconds": 1, "failing": []}]
    rows += [row(f"s{n}", "survived") for n in range(survived)]
    rows += [row(f"k{n}", "killed") for n in range(of - survived)]
    return judge("1.0", rows, [Equivalent("m", "f", change, "why") for change in named])


def test_what_survives_counts_unless_it_is_named() -> None:
    assert said(6).share > SHARE
    assert said(6, "s0").share == SHARE
    assert said(6, "s0").total.equivalent == 1


def test_what_runs_on_import_counts_as_nothing() -> None:
    assert judge("1.0", [row("a", "import")], []).total.mutants == 0


def test_what_no_test_reaches_has_survived() -> None:
    assert judge("1.0", [row("a", "not covered")], []).share == 1


@pytest.mark.parametrize(("change", "what"), [("k1", "killed"), ("gone", "no mutant any more")])
def test_what_is_named_and_does_not_survive_is_a_fault(change: str, what: str) -> None:
    (fault,) = said(0, change).faults
    assert what in fault


def test_a_name_holds_on_its_releases_and_for_modules_that_were_tried() -> None:
    elsewhere = [Equivalent("m", "f", "x", "why", ">=2"), Equivalent("other", "f", "x", "why")]
    assert judge("1.0", [row("a", "killed")], elsewhere).faults == []


@pytest.mark.parametrize(
    "table",
    [
        'module = "m"\nfunction = "f"\nchange = "a -> b"',
        'module = "m"\nfunction = "f"\nchange = "a -> b"\nwhy = " "',
        'module = "m"\nfunction = "f"\nchange = "a -> b"\nwhy = "w"\nreleases = "new"',
    ],
)
def test_a_table_that_says_too_little_is_refused(table: str, tmp_path: Path) -> None:
    (tmp_path / "m.toml").write_text(f"[[equivalent]]\n{table}\n")
    with pytest.raises(RegistryError):
        read_equivalents(tmp_path / "m.toml")


def test_a_mutant_is_named_once(tmp_path: Path) -> None:
    table = '[[equivalent]]\nmodule = "m"\nfunction = "f"\nchange = "a -> b"\nwhy = "w"\n'
    (tmp_path / "m.toml").write_text(table * 2)
    with pytest.raises(RegistryError, match="2 times"):
        read_equivalents(tmp_path / "m.toml")


def test_every_name_is_of_a_mutant_that_there_is() -> None:
    for one in read_equivalents():
        path = ROOT / (one.module.replace(".", "/") + ".py")
        found = {(m.function, m.change) for m in mutants_of(ast.parse(path.read_bytes()))}
        assert (one.function, one.change) in found, f"{one.module}: {one.function}: {one.change}"


# ---------------------------------------------------------------- what is tried


def test_a_release_has_the_modules_that_it_uses() -> None:
    modules = overlay_modules("0.33.0", load_series("0.33.0"))
    names = {Path(name).name for name in modules}
    assert {"pull_worker.py", "pairing.py", "params.py"} <= names
    assert not {"receive.py", "older_invalid_blocks.py"} & names


def test_a_release_has_the_tests_of_its_fixes_and_of_the_overlay() -> None:
    chosen = that_test("0.33.0")
    assert chosen[0] == "tests/overlay"
    assert "tests/regressions/test_k05.py" in chosen
    assert "tests/regressions/test_40449.py" not in chosen  # fixed in 0.21.0
    assert (ROOT / run._INSTALLED).is_file(), "left out: stock is installed there"


def test_the_core_of_the_tools_is_there_and_has_tests() -> None:
    for name in CORE:
        assert (ROOT / name).is_file()
        assert (ROOT / "tests" / name).parent.is_dir()


def test_a_name_that_no_module_has_is_refused() -> None:
    with pytest.raises(UsageError, match="nowhere"):
        run.of_tools(["nowhere"], 1)


def test_of_the_tools_every_name_counts() -> None:
    assert Equivalent("m", "f", "c", "w", "==1.0").is_for(TOOLS)


def test_what_was_tried_stays_when_the_run_is_broken_off(toy: Path) -> None:
    (toy / "rows.jsonl").write_text("of a run before\n")
    (toy / "conftest.py").write_text("def pytest_sessionfinish():\n    raise RuntimeError\n")
    with pytest.raises(CheckFailedError, match="pytest ended with"):
        tried(toy)
    rows = [json.loads(line) for line in (toy / "rows.jsonl").read_text().splitlines()]
    assert "killed" in verdicts(rows).values()


def test_without_a_process_nothing_is_tried(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["mutants", "tools", "--workers", "0"])
    monkeypatch.setattr(mutants, "of_tools", lambda *_: pytest.fail("it began"))
    with pytest.raises(SystemExit) as caught:
        mutants.main()
    assert caught.value.code == 2
    assert "--workers: 0 is less than 1" in capsys.readouterr().err

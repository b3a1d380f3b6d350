"""Which defects a release has where P pushes: the tests of tests/push on stock and on patched.

`records/push.json` keeps what was seen, release → test → side; docs/push.md shows it as a table.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from packaging.specifiers import SpecifierSet

from scripts.patchset.series import load_series
from scripts.project import RECORDS, ROOT, project
from scripts.prove.environment import Environment
from scripts.prove.outcomes import Outcomes, is_of
from scripts.prove.pytest import Run, run_together
from scripts.system.console import err
from scripts.system.files import replace_text

TESTS = "tests/push/test_defects.py"
RECORD = RECORDS / "push.json"
PAGE = ROOT / "docs" / "push.md"
HAVE = SpecifierSet(">=0.24.0")
"""The releases with a connector that pushes."""

_LIMIT = 400.0  # seconds for a side; it takes 30
_MARKED = re.compile(r"(<!-- table.*?-->\n).*?(<!-- end of table -->)", re.DOTALL)

Seen = dict[str, dict[str, str]]
"""Test → side → "passed" or "failed"."""


@dataclass(frozen=True)
class Shown:
    """A test by its mark; see tests/push/conftest.py.

    Attributes:
        test: Its name.
        defect: The fix whose defect it is like, or "-".
        mends: Where patched has to pass it and stock to fail it (PEP 440); None for nowhere.
        says: What happens where the defect is there.
    """

    test: str
    defect: str
    mends: SpecifierSet | None
    says: str


def shown(source: str) -> list[Shown]:
    """Return the tests of a file in their order.

    Raises:
        ValueError: One has no mark or no docstring.
    """
    found = []
    for function in ast.parse(source).body:
        if not isinstance(function, ast.FunctionDef) or not function.name.startswith("test_"):
            continue
        says = (ast.get_docstring(function) or "").partition("\n")[0]
        calls = [one for one in function.decorator_list if isinstance(one, ast.Call)]
        marks = [one for one in calls if ast.unparse(one.func) == "shows"]
        if len(marks) != 1 or not says:
            raise ValueError(f"{function.name} needs one mark `shows` and a docstring")
        (mark,) = marks
        named = {word.arg: ast.literal_eval(word.value) for word in mark.keywords}
        mends = SpecifierSet(named["mends"]) if "mends" in named else None
        found.append(Shown(function.name, ast.literal_eval(mark.args[0]), mends, says))
    return found


def all_shown() -> list[Shown]:
    """Return the tests of tests/push."""
    return shown((ROOT / TESTS).read_text(encoding="utf-8"))


def releases() -> list[str]:
    """Return the supported releases with a connector that pushes."""
    return [one for one in project().releases if HAVE.contains(one)]


def observe(release: str) -> dict[str, Outcomes]:
    """Run the tests on both sides of `release`; outcomes by side and node id."""
    environment = Environment(release).make()
    environment.install(environment.stock)
    folder = ROOT / ".nox" / f"push-{release}"
    try:
        shadow = environment.shadow(folder, load_series(release).patches)
        err.print(f"{release}: stock, patched ...")
        runs = {"stock": Run([TESTS]), "patched": Run([TESTS], shadow)}
        outcomes, _ = run_together(environment, runs, timeout=_LIMIT)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return outcomes


def judge(
    release: str, tests: Iterable[Shown], outcomes: Mapping[str, Outcomes]
) -> tuple[Seen, list[str]]:
    """Say what was seen, and what is wrong with it.

    A test with several cases fails if one does. Only what the test's own file asserts shows
    a defect; anything else that ends a test shows nothing.
    """
    seen: Seen = {}
    faults: list[str] = []
    for one in tests:
        sides = {}
        for side, all_nodes in outcomes.items():
            nodes = {n: o for n, o in all_nodes.items() if is_of(n, f"{TESTS}::{one.test}")}
            broken = [*_broken(nodes)]
            faults += [f"{release}, {side}: {node}: {what}" for node, what in broken]
            if broken:
                continue
            failed = [node for node, outcome in nodes.items() if outcome.result == "failed"]
            sides[side] = "failed" if failed else "passed"
            if side == "stock" and _mended(one, release) and len(failed) != len(nodes):
                faults.append(f"{release}: {one.test} does not fail on stock, at least not wholly")
        if sides.keys() != outcomes.keys():
            continue
        seen[one.test] = sides
        if sides["patched"] == "failed" and _mended(one, release):
            faults.append(f"{release}: {one.test} fails on patched, which mends {one.defect}")
        elif sides == {"stock": "passed", "patched": "failed"}:
            faults.append(f"{release}: {one.test} passes on stock and fails on patched")
    return seen, faults


def _mended(one: Shown, release: str) -> bool:
    return one.mends is not None and one.mends.contains(release)


def _broken(nodes: Outcomes) -> Iterator[tuple[str, str]]:
    if not nodes:
        yield "the test", "did not run"
    for node, outcome in nodes.items():
        if outcome.result != "passed" and not outcome.is_assertion:
            name = node.rpartition("::")[2]
            yield name, f"{outcome.result} ({outcome.raised or '-'}): {outcome.message[:200]}"


def recorded(path: Path = RECORD) -> dict[str, Seen]:
    """Return what is on record, by release."""
    if not path.is_file():
        return {}
    found: dict[str, Seen] = json.loads(path.read_text(encoding="utf-8"))
    return found


def record(release: str, seen: Seen, path: Path = RECORD) -> None:
    """Put what was seen on record, in place of what was there of `release`."""
    document = {**recorded(path), release: seen}
    ordered = {one: document[one] for one in project().releases if one in document}
    replace_text(path, json.dumps(ordered, indent=1) + "\n")


def table(tests: Iterable[Shown], document: Mapping[str, Seen], among: Iterable[str]) -> str:
    """Return what is on record as Markdown; releases that show the same share a column."""
    rows = list(tests)
    columns = [
        (list(same), cells)
        for cells, same in groupby(among, lambda one: _column(rows, document.get(one)))
    ]
    heads = [_span(same) for same, _ in columns]
    lines = [
        f"| defect | like | {' | '.join(heads)} |",
        f"|---|---|{'---|' * len(heads)}",
    ]
    for number, one in enumerate(rows):
        like = one.defect if one.defect == "-" else f"[{one.defect}](fixes.md#{one.defect.lower()})"
        cells = " | ".join(column[number] for _, column in columns)
        lines.append(f"| {one.says.rstrip('.')} | {like} | {cells} |")
    return "\n".join(lines) + "\n"


def _span(releases: list[str]) -> str:
    if len(releases) > 2:
        return f"{releases[0]} to {releases[-1]}"
    return ", ".join(releases)


def _column(tests: list[Shown], seen: Seen | None) -> tuple[str, ...]:
    if seen is None:
        return ("not run",) * len(tests)
    return tuple(_cell(seen.get(one.test)) for one in tests)


def _cell(sides: Mapping[str, str] | None) -> str:
    if sides is None:
        return "not run"
    marks = {side: "✓" if result == "passed" else "✗" for side, result in sides.items()}
    if marks["stock"] == marks["patched"]:
        return f"{marks['stock']} both"
    return f"{marks['stock']} stock {marks['patched']} patched"


def write_page(page: Path = PAGE) -> None:
    """Put the table of what is on record into docs/push.md."""
    made = table(all_shown(), recorded(), releases())
    text = page.read_text(encoding="utf-8")
    replace_text(page, _MARKED.sub(lambda match: match[1] + made + match[2], text))

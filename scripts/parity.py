"""`nox -s parity -- [RELEASE...] [-k NAME]`: patched against stock, where stock is right.

The other sessions compare a build with what is right. This one runs the scenarios of tests/parity
on the stock and on the patched wheel of a release, side by side in one environment, and compares
what could be seen: what a client was answered, what the engine core was sent, what a prefill server
was told and when, whether the engine lives, whether it is busy. A difference is a fault, for
a patched build is never worse than stock.

Where stock has the defect of one of our fixes the scenario is left out, with the reason; what is
right there is the business of `nox -s regressions`. What crashes on both sides shows nothing and
fails the session too.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from scripts.apply import patched_wheel
from scripts.digest import sha256
from scripts.environment import Environment, stage
from scripts.errors import CheckFailedError, UsageError
from scripts.fixes import Registry, load_registry
from scripts.proc import run
from scripts.project import REPORTS, ROOT, project, supported_release
from scripts.terminal import entry, err, out

SIDES = ("stock", "patched")
_LIMIT = 1800.0  # seconds for a side; each scenario has its own, much shorter limit
_SHOWN = 3  # faults of one scenario on the screen
_NO_SUCH_NAME = 3  # what the runner exits with

Row = Mapping[str, Any]
"""What one side has to say of a scenario; see tests/parity/__main__.py."""


@dataclass(frozen=True)
class Difference:
    """One value that is not the same on both sides; None where a side has none."""

    where: str
    stock: Any
    patched: Any

    def __str__(self) -> str:
        stock, patched = _words(self.stock), _words(self.patched)
        pairs = enumerate(zip(stock, patched, strict=False))
        same = next((i for i, (one, other) in pairs if one != other), 0)
        stock, patched = _around(stock, same), _around(patched, same)
        return f"{self.where or 'it'}: {stock} on stock, {patched} on patched"


@dataclass
class Verdict:
    """What both sides together say of one scenario.

    Attributes:
        left_out: why it says nothing on this release; empty if it was run.
        differences: values that differ.
        faults: what keeps it from being a pass, differences included.
        seconds: CPU time by side.
    """

    scenario: str
    left_out: str = ""
    differences: list[Difference] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def word(self) -> str:
        """The verdict in a word or two."""
        if self.faults:
            return "differs" if self.differences else "fault"
        return "left out" if self.left_out else "same"


def main() -> None:
    """Compare the releases that the command line names, or the default one."""
    parser = argparse.ArgumentParser(
        prog="nox -s parity --",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("release", nargs="*", default=[project().default_release])
    parser.add_argument("-k", dest="name", default="", help="scenarios with this in their name")
    options = parser.parse_args()
    registry = load_registry()
    faults: list[str] = []
    for release in map(supported_release, options.release):
        verdicts = compare(release, options.name, registry)
        _write_report(release, verdicts)
        out.print(_table(release, verdicts))
        faults += [line for verdict in verdicts for line in _lines(release, verdict)]
    for fault in faults:
        err.print(f"✗ {fault}", markup=False)
    if faults:
        raise CheckFailedError(
            "a patched build is not like stock, or nobody can tell",
            expected="the patched build like stock wherever stock is right",
            next_step="nox -s parity -- RELEASE -k NAME; reports/ has every difference",
        )


def _lines(release: str, verdict: Verdict) -> Iterator[str]:
    """Yield the first faults of a scenario; one cause often shows in a hundred places."""
    for fault in verdict.faults[:_SHOWN]:
        yield f"{release}: {verdict.scenario}: {fault}"
    if (more := len(verdict.faults) - _SHOWN) > 0:
        yield f"{release}: {verdict.scenario}: … and {more} more"


def compare(release: str, name: str, registry: Registry) -> list[Verdict]:
    """Run the scenarios that have `name` in theirs on both sides of `release`.

    Raises:
        UsageError: None has.
        CheckFailedError: A side could not be run.
    """
    environment = Environment(release).make()
    work = ROOT / ".work" / "parity" / release
    wheels = {"stock": environment.stock, "patched": patched_wheel(release)}
    for side, wheel in wheels.items():
        environment.install_into(work / side, wheel, sha256(wheel))
    affected = [fix.id for fix in registry.fixes.values() if fix.affects(release)]
    wire = work / "run"
    shutil.rmtree(wire, ignore_errors=True)
    wire.mkdir()
    # Both at once: some scenarios need what the other side has written.
    with ThreadPoolExecutor(max_workers=len(SIDES)) as pool:
        results = pool.map(
            lambda side: _run(environment, work / side, side, wire, name, affected), SIDES
        )
        rows = dict(zip(SIDES, results, strict=True))
    return verdicts_on(rows["stock"], rows["patched"], registry.fixes)


def _run(
    environment: Environment, site: Path, side: str, wire: Path, name: str, affected: list[str]
) -> dict[str, Row]:
    """Run one side and return its rows by the scenario's name."""
    err.print(f"{environment.release}: {side} ...")
    rows = wire / f"{side}.jsonl"
    (other,) = set(SIDES) - {side}
    try:
        result = run(
            [
                environment.python, "-W", "ignore", "-m", "tests.parity", "--out", rows,
                "-k", name, "--wire", wire, side, other, "--affected", *affected,
            ],
            cwd=stage(),
            env=environment.variables(site),
            timeout=_LIMIT,
            check=False,
        )  # fmt: skip
    finally:
        (wire / f"{side}.ended").touch()
    if result.returncode == _NO_SUCH_NAME:
        raise UsageError(
            f"no scenario has {name!r} in its name",
            expected="a part of " + ", ".join(result.stdout.splitlines()[-1].split()),
            next_step=f"nox -s parity -- {environment.release}",
        )
    if result.returncode or not rows.is_file():
        kept = REPORTS / f"parity-{environment.release}-{side}.log"
        REPORTS.mkdir(exist_ok=True)
        kept.write_text(result.stdout + result.stderr, encoding="utf-8")
        err.print(f"✗ {side} ended with {result.returncode}: {kept}", markup=False)
    return read_rows(rows)


def read_rows(path: Path) -> dict[str, Row]:
    """Read what a side has written, as far as it got; its last line may be cut."""
    found: dict[str, Row] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            row = json.loads(line)
        except ValueError:
            break
        found[row["name"]] = row
    return found


def verdicts_on(
    stock: Mapping[str, Row], patched: Mapping[str, Row], fixes: Collection[str]
) -> list[Verdict]:
    """Say of each scenario whether both sides agree.

    Args:
        stock: Rows of the stock side by name.
        patched: Those of the patched side.
        fixes: Ids that exist.

    Raises:
        CheckFailedError: Nothing was run on either side.
    """
    if not stock and not patched:
        raise CheckFailedError(
            "no scenario was run on either side",
            expected="at least one",
            next_step="read reports/parity-RELEASE-SIDE.log",
        )
    verdicts = []
    for name in dict.fromkeys((*stock, *patched)):
        verdict = Verdict(name)
        mine, theirs = stock.get(name), patched.get(name)
        verdict.seconds = {
            side: row["seconds"] for side, row in zip(SIDES, (mine, theirs), strict=True) if row
        }
        verdict.faults += _judge(verdict, mine, theirs)
        for row in filter(None, (mine, theirs)):
            unknown = sorted(set(row.get("shows", ())) - set(fixes))
            verdict.faults += [f"it names a fix {fix}, which there is not" for fix in unknown]
        verdicts.append(verdict)
    return verdicts


def _judge(verdict: Verdict, stock: Row | None, patched: Row | None) -> Iterator[str]:
    if stock is None or patched is None:
        yield f"it did not run on {'stock' if stock is None else 'the patched build'}"
        return
    for side, row in zip(SIDES, (stock, patched), strict=True):
        if "crashed" in row:
            yield f"it crashed on {side}: {row['crashed'].strip().splitlines()[-1]}"
    if "crashed" in stock or "crashed" in patched:
        return
    if "left_out" in stock or "left_out" in patched:
        verdict.left_out = stock.get("left_out") or patched["left_out"]
        if stock.get("left_out") != patched.get("left_out"):
            yield f"one side leaves it out, or for another reason: {verdict.left_out}"
        return
    verdict.differences = [*_compared(stock["observed"], patched["observed"])]
    yield from map(str, verdict.differences)


def _compared(stock: Any, patched: Any) -> Iterator[Difference]:  # noqa: ANN401
    """Compare two observations; of what was exchanged, all readings with stock's of its own."""
    exchanged = {"own", "other's"}
    if isinstance(stock, dict) and isinstance(patched, dict) and stock.keys() == exchanged:
        readings = {
            "stock's, read by patched": patched.get("other's"),
            "patched's, read by stock": stock["other's"],
            "patched's, read by patched": patched.get("own"),
        }
        for where, reading in readings.items():
            yield from differences(stock["own"], reading, where)
    else:
        yield from differences(stock, patched)


def differences(stock: Any, patched: Any, where: str = "") -> Iterator[Difference]:  # noqa: ANN401
    """Yield each place at which two observations differ.

    `{"at least": [...]}` on both sides differs only in what stock has and patched has not.
    """
    if isinstance(stock, dict) and isinstance(patched, dict):
        if stock.keys() == patched.keys() == {"at least"}:
            missing: Counter[str] = Counter(stock["at least"]) - Counter(patched["at least"])
            for thing in missing.elements():
                yield Difference(where, thing, None)
            return
        for key in dict.fromkeys((*stock, *patched)):
            inner = f"{where} → {key}" if where else str(key)
            yield from differences(stock.get(key), patched.get(key), inner)
    elif isinstance(stock, list) and isinstance(patched, list) and len(stock) == len(patched):
        for i, (mine, theirs) in enumerate(zip(stock, patched, strict=True)):
            yield from differences(mine, theirs, f"{where}[{i}]")
    elif stock != patched or type(stock) is not type(patched):
        yield Difference(where, stock, patched)


def _words(value: object) -> str:
    if value is None:
        return "nothing"
    return value if isinstance(value, str) else json.dumps(value)


def _around(text: str, place: int) -> str:
    """Some of `text` from shortly before `place`, where it begins to differ."""
    start = max(0, place - 30)
    return ("… " if start else "") + text[start : start + 120]


def _table(release: str, verdicts: list[Verdict]) -> Table:
    table = Table("scenario", "", "CPU", "first fault, or why it is left out", title=release)
    for verdict in verdicts:
        seconds = " ".join(f"{one:.1f}" for one in verdict.seconds.values())
        words = verdict.faults[0] if verdict.faults else verdict.left_out
        mark = "✗" if verdict.faults else "-" if verdict.left_out else "✓"
        row = (verdict.scenario, f"{mark} {verdict.word}", seconds, words[:160])
        table.add_row(*map(escape, row))
    return table


def _write_report(release: str, verdicts: list[Verdict]) -> None:
    REPORTS.mkdir(exist_ok=True)
    report = {
        "release": release,
        "patch_set": project().version,
        "scenarios": {one.scenario: {**asdict(one), "verdict": one.word} for one in verdicts},
    }
    path = REPORTS / f"parity-{release}.json"
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    entry(main)

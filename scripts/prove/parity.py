"""A patched build against stock, where stock is right: the scenarios of tests/parity on both."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from scripts.patchset.registry import Registry
from scripts.project import REPORTS, ROOT, project, read_toml
from scripts.prove.environment import Environment, stage
from scripts.system.console import err
from scripts.system.errors import CheckFailedError, UsageError
from scripts.system.files import sha256
from scripts.system.process import run
from scripts.wheel.build import patched_wheel

SIDES = ("stock", "patched")
_LIMIT = 1800.0  # seconds for a side; each scenario has its own, much shorter limit
_NO_SUCH_NAME = 3  # what the runner exits with

Row = Mapping[str, Any]
"""What one side has to say of a scenario; see tests/parity/__main__.py."""


NONE = "nothing"
"""In the place of a value that a side does not have, which null is not."""


@dataclass(frozen=True)
class Difference:
    """One value that is not the same on both sides; `NONE` where a side has none."""

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
class Comparison:
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


def compare(release: str, name: str, registry: Registry) -> list[Comparison]:
    """Run the scenarios that have `name` in theirs on both sides of `release`.

    Raises:
        UsageError: None has.
        CheckFailedError: A side could not be run.
    """
    environment = Environment(release).make()
    work = ROOT / ".work" / "parity" / release
    wheels = {"stock": environment.stock, "patched": patched_wheel(release)}
    for side, wheel in wheels.items():
        environment.install_into(work / side, sha256(wheel), wheel)
    clients = _clients(environment, work / "clients")
    affected = [fix.id for fix in registry.fixes.values() if fix.affects(release)]
    wire = work / "run"
    shutil.rmtree(wire, ignore_errors=True)
    wire.mkdir()
    # Both at once: some scenarios need what the other side has written.
    with ThreadPoolExecutor(max_workers=len(SIDES)) as pool:
        results = pool.map(
            lambda side, given: _run(environment, given, side, wire, name, affected),
            SIDES,
            [variables(environment, work / side, clients) for side in SIDES],
        )
        rows = dict(zip(SIDES, results, strict=True))
    return compared(rows["stock"], rows["patched"], registry.fixes)


def _clients(environment: Environment, folder: Path) -> Path:
    """Make a folder with what pyproject.toml has parity need, without what that needs in turn.

    It is no part of the environment: some of it is a plugin, which vLLM loads wherever it is
    installed.
    """
    document = read_toml(ROOT / "pyproject.toml")
    wanted: list[str] = document["tool"]["kvfix"]["parity"]["requirements"]
    environment.install_into(folder, "\n".join(wanted), *wanted, timeout=600)
    return folder


def variables(environment: Environment, site: Path, clients: Path) -> dict[str, str]:
    """Return the variables under which the `vllm` of `site` and `clients` are imported."""
    found = environment.variables(site)
    found["PYTHONPATH"] += os.pathsep + str(clients)
    return found | {"VLLM_PLUGINS": ""}  # none: the scenarios call what they need


def _run(
    environment: Environment,
    variables: Mapping[str, str],
    side: str,
    wire: Path,
    name: str,
    affected: list[str],
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
            env=variables,
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


def compared(
    stock: Mapping[str, Row], patched: Mapping[str, Row], fixes: Collection[str]
) -> list[Comparison]:
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
            next_step="read the log of each side, which is named above",
        )
    comparisons = []
    for name in dict.fromkeys((*stock, *patched)):
        comparison = Comparison(name)
        mine, theirs = stock.get(name), patched.get(name)
        comparison.seconds = {
            side: row["seconds"] for side, row in zip(SIDES, (mine, theirs), strict=True) if row
        }
        comparison.faults += _judge(comparison, mine, theirs)
        for row in filter(None, (mine, theirs)):
            unknown = sorted(set(row.get("shows", ())) - set(fixes))
            comparison.faults += [f"it names a fix {fix}, which there is not" for fix in unknown]
        comparisons.append(comparison)
    return comparisons


def _judge(comparison: Comparison, stock: Row | None, patched: Row | None) -> Iterator[str]:
    if stock is None or patched is None:
        yield f"it did not run on {'stock' if stock is None else 'the patched build'}"
        return
    for side, row in zip(SIDES, (stock, patched), strict=True):
        if "crashed" in row:
            yield f"it crashed on {side}: {row['crashed'].strip().splitlines()[-1]}"
    if "crashed" in stock or "crashed" in patched:
        return
    if "left_out" in stock or "left_out" in patched:
        comparison.left_out = stock.get("left_out") or patched["left_out"]
        if stock.get("left_out") != patched.get("left_out"):
            yield f"one side leaves it out, or for another reason: {comparison.left_out}"
        return
    comparison.differences = [*_compared(stock["observed"], patched["observed"])]
    yield from map(str, comparison.differences)


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
                yield Difference(where, thing, NONE)
            return
        for key in dict.fromkeys((*stock, *patched)):
            inner = f"{where} → {key}" if where else str(key)
            yield from differences(stock.get(key, NONE), patched.get(key, NONE), inner)
    elif isinstance(stock, list) and isinstance(patched, list) and len(stock) == len(patched):
        for i, (mine, theirs) in enumerate(zip(stock, patched, strict=True)):
            yield from differences(mine, theirs, f"{where}[{i}]")
    elif stock != patched or type(stock) is not type(patched):
        yield Difference(where, stock, patched)


def _words(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _around(text: str, place: int) -> str:
    """Some of `text` from shortly before `place`, where it begins to differ."""
    start = max(0, place - 30)
    return ("… " if start else "") + text[start : start + 120]


def write_report(release: str, comparisons: list[Comparison]) -> None:
    """Write `reports/parity-<release>.json`: every scenario, and every difference."""
    REPORTS.mkdir(exist_ok=True)
    report = {
        "release": release,
        "patch_set": project().version,
        "scenarios": {one.scenario: {**asdict(one), "verdict": one.word} for one in comparisons},
    }
    path = REPORTS / f"parity-{release}.json"
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")

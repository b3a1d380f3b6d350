"""P and D as wholes under a simulation: tests/simulation, in the environment of a release.

What one side shows is played once more on the other: a patched build must show nothing that stock
does not show as well.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.patchset.series import load_series
from scripts.project import REPORTS
from scripts.prove.environment import Environment, stage
from scripts.system.errors import CheckFailedError
from scripts.system.process import run

SIDES = ("stock", "patched")
_LIMIT = 6.25 * 3600.0  # seconds for a side

Row = Mapping[str, Any]
"""What is written of a finding, and at the end; see tests/simulation/__main__.py."""


@dataclass
class Side:
    """What was played on one side of a release.

    Attributes:
        findings: by label, the first history that showed it.
        steps, histories, seconds: how much was played, and how long it took.
        elsewhere: label -> what its shrunk history shows on the other side; None if nothing. Empty
            where nobody tried.
    """

    name: str
    findings: dict[str, Row] = field(default_factory=dict)
    times: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    histories: int = 0
    seconds: float = 0.0
    elsewhere: dict[str, str | None] = field(default_factory=dict)

    @property
    def own(self) -> list[str]:
        """The labels that the other side does not show in the same history."""
        return [label for label, there in self.elsewhere.items() if there != label]


def simulate(release: str, sides: Sequence[str], arguments: Sequence[str]) -> list[Side]:
    """Play histories on the sides of a release.

    Args:
        release: In its normal form.
        sides: Of `SIDES`.
        arguments: What tests.simulation takes: how much, which, from which seed.

    Raises:
        CheckFailedError: The simulation itself ended in an error.
    """
    environment = Environment(release).make()
    environment.install(environment.stock)
    folder = environment.folder.parent / f"simulate-{release}"
    REPORTS.mkdir(exist_ok=True)
    try:
        shadow = environment.shadow(folder, load_series(release).patches)
        places: dict[str, Path | None] = {"stock": None, "patched": shadow}
        played = []
        for name in sides:
            report = REPORTS / f"simulate-{release}-{name}.jsonl"
            _start(environment, places[name], report, arguments)
            side = read(name, report)
            if name == "patched" and side.findings:
                replayed = REPORTS / f"simulate-{release}-replayed.jsonl"
                _start(environment, None, replayed, ["--replay", str(report)])
                rows = map(json.loads, replayed.read_text(encoding="utf-8").splitlines())
                side.elsewhere = {row["of"]: row["label"] for row in rows}
            played.append(side)
        return played
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def read(name: str, report: Path) -> Side:
    """Read what was written of a side.

    Raises:
        CheckFailedError: It has no end.
    """
    side, ended = Side(name), False
    for line in report.read_text(encoding="utf-8").splitlines() if report.is_file() else ():
        row = json.loads(line)
        if "label" in row:
            side.findings[row["label"]] = row
        else:
            side.times, ended = row["found"], True
            side.steps, side.histories = row["steps"], row["histories"]
            side.seconds = row["seconds"]
    if not ended:
        raise CheckFailedError(
            f"{report.name} has no end: the simulation was stopped, or failed",
            expected="a last line that says how much was played",
            next_step="run the same command again, with fewer steps",
        )
    return side


def _start(
    environment: Environment, shadow: Path | None, report: Path, arguments: Sequence[str]
) -> None:
    report.unlink(missing_ok=True)
    own = {
        "PYTHONHASHSEED": "0",  # or sets have another order in each run
        "OMP_NUM_THREADS": "1",
        "VLLM_PLUGINS": "",
    }
    result = run(
        [
            environment.python, "-W", "ignore", "-m", "tests.simulation",
            "--out", os.fspath(report), *arguments,
        ],
        cwd=stage(),
        env={**environment.variables(shadow), **own},
        timeout=_LIMIT,
        check=False,
    )  # fmt: skip
    if result.returncode:
        raise CheckFailedError(
            f"the simulation ended with {result.returncode}:\n{result.stderr[-3000:]}",
            expected="histories, and what they show",
            next_step="read what it says above; tests/simulation/test_checks.py tries its parts",
        )

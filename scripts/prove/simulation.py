"""P and D as wholes under a simulation: tests/simulation, in the environment of a release.

What one side shows is played once more on the other: a patched build must show nothing that stock
does not show as well. And of one life of engines, with thousands of requests, it must keep nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.patchset.series import load_series
from scripts.project import REPORTS, ROOT
from scripts.prove.environment import Environment, stage
from scripts.prove.timeline import as_svg
from scripts.system.errors import CheckFailedError
from scripts.system.process import run

SIDES = ("stock", "patched")
PROFILES = (
    "quiet",
    "clients",
    "reads",
    "hybrid",
    "window",
    "ranks",
    "latent",
    "readers",
    "handshakes",
    "nodes",
    "leases",
    "async",
    "full",
    "states",
    "prefixes",
    "slots",
    "blockwise",
    "parts_of_blocks",
    "exports",
    "crowded",
    "lookahead",
    "guesses",
    "restarts",
    "refusals",
    "turns",
    "slot_turns",
    "long_turns",
    "all",
)
"""Of tests/simulation/history.py, which needs vLLM to be imported."""
_LIMIT = 6.25 * 3600.0  # seconds for a side

GROWS = {
    "connector.claims._claims": "K11: a claim for each request read, up to 131,072",
    "book._read": "K20: who has read, up to 65,536",
    "fix_counts.py _counts": "K21: a count for each reason, until somebody takes it",
    "single_type_managers[].new_block_ids": "stock's: each block that was given out",
    "worker._remote_agents": "stock's: a P that comes back under another id",
    "worker.dst_num_blocks": "stock's: the same",
    "worker.dst_xfer_side_handles": "stock's: the same",
    "worker.kv_caches_base_addr": "stock's: the same",
    "worker.transfer_topo._engines": "stock's: the same",
    "worker._remote_registration_generations": "stock's: the same",
    "memory blocks of Python": "what is named above, and what holds it",
}
"""Tables, by how their names end, of which it is known that they grow, and why."""

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
    played = []
    with _both(release) as (environment, places):
        for name in sides:
            report = REPORTS / f"simulate-{release}-{name}.jsonl"
            _start(environment, places[name], report, arguments)
            side = read(name, report)
            if name == "patched" and side.findings:
                replayed = REPORTS / f"simulate-{release}-replayed.jsonl"
                _start(environment, None, replayed, ["--replay", str(report)])
                side.elsewhere = {row["of"]: row["label"] for row in _rows(replayed)}
            played.append(side)
    return played


def drawn(release: str, side: Side) -> dict[str, Path]:
    """Draw what was found on a side; nothing stays of those that were drawn before.

    Returns:
        label -> where its picture is, below the root of the repository.
    """
    name = f"simulate-{release}-{side.name}"
    for old in REPORTS.glob(f"{name}-*.svg"):
        old.unlink()
    pictures = {}
    for number, (label, row) in enumerate(side.findings.items(), 1):
        path = REPORTS / f"{name}-{number}.svg"
        title = f"vLLM {release}, {side.name}: {label} ({row['seed']})"
        path.write_text(as_svg(title, row["columns"], row["lines"]), encoding="utf-8")
        pictures[label] = path.relative_to(ROOT)
    return pictures


@dataclass
class Life:
    """What was seen of one life of engines on a side of a release.

    Attributes:
        requests, steps, seconds: how much they served, and how long that took.
        growing: table -> the most entries in its first quarter, the fewest in its last.
        memory: blocks that Python had given out at the first measurement, and at the last.
        events, ends, found: how often each kind of event was played, requests ended in each way,
            and something was not as it has to be.
    """

    name: str
    requests: int
    steps: int
    seconds: float
    growing: dict[str, tuple[int, int]]
    memory: tuple[int, int]
    events: dict[str, int]
    ends: dict[str, int]
    found: dict[str, int]

    @property
    def unexplained(self) -> list[str]:
        """The tables that grow, and nobody knows why."""
        return [table for table in self.growing if why(table) is None]


def why(table: str) -> str | None:
    """Say why a table grows; None if that is not known."""
    return next((why for end, why in GROWS.items() if table.endswith(end)), None)


def live(release: str, sides: Sequence[str], arguments: Sequence[str]) -> list[Life]:
    """Let engines serve requests on the sides of a release; as `simulate`."""
    lives = []
    with _both(release) as (environment, places):
        for name in sides:
            report = REPORTS / f"simulate-{release}-{name}-life.jsonl"
            _start(environment, places[name], report, arguments)
            lives.append(read_life(name, report))
    return lives


def read_life(name: str, report: Path) -> Life:
    """Read what was written of a life.

    Raises:
        CheckFailedError: It has no end, or a line that is not whole.
    """
    rows = _rows(report)
    samples = [row for row in rows if "sizes" in row]
    if not samples or "growing" not in rows[-1]:
        raise _endless(report)
    end = rows[-1]
    first, last = (row["sizes"]["memory blocks of Python"] for row in (samples[0], samples[-1]))
    return Life(
        name=name,
        requests=samples[-1]["requests"],
        steps=end["steps"],
        seconds=end["seconds"],
        growing={table: (most, least) for table, (most, least) in end["growing"].items()},
        memory=(first, last),
        events=end["events"],
        ends=end["ends"],
        found=end["found"],
    )


@contextlib.contextmanager
def _both(release: str) -> Iterator[tuple[Environment, dict[str, Path | None]]]:
    """The environment of a release, and where the vLLM of each side lies in it."""
    environment = Environment(release).make()
    environment.install(environment.stock)
    folder = environment.folder.parent / f"simulate-{release}"
    REPORTS.mkdir(exist_ok=True)
    try:
        yield (
            environment,
            {
                "stock": None,
                "patched": environment.shadow(folder, load_series(release).patches),
            },
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def read(name: str, report: Path) -> Side:
    """Read what was written of a side.

    Raises:
        CheckFailedError: It has no end, or a line that is not whole.
    """
    side, ended = Side(name), False
    for row in _rows(report) if report.is_file() else ():
        if "label" in row:
            side.findings[row["label"]] = row
        else:
            side.times, ended = row["found"], True
            side.steps, side.histories = row["steps"], row["histories"]
            side.seconds = row["seconds"]
    if not ended:
        raise _endless(report)
    return side


def _rows(report: Path) -> list[Row]:
    try:
        return [json.loads(line) for line in report.read_text(encoding="utf-8").splitlines()]
    except json.JSONDecodeError as error:
        raise _endless(report) from error


def _endless(report: Path) -> CheckFailedError:
    return CheckFailedError(
        f"{report.name} has no end: the simulation was stopped, or failed, or another wrote there",
        expected="a last line that says how much was played",
        next_step="run the same command again, with fewer steps, and none beside it",
    )


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

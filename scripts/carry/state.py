"""What a rebase remembers between its steps: one file, written whole, that survives a kill."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path

from scripts.carry.merge import Status
from scripts.project import ROOT, project
from scripts.prove.stock import Stock
from scripts.system.errors import UsageError
from scripts.system.files import read_json, replace_text
from scripts.upstream.lock import load_lock

WORK = ROOT / ".work" / "rebase"
STATE = WORK / "state.json"


def not_carried() -> str:
    """Return a release that the fixes can be carried to: the newest pinned one without them."""
    pinned = [*load_lock()] or [project().default_release]
    return next((one for one in reversed(pinned) if one not in project().releases), pinned[-1])


class Phase(Enum):
    """How far a rebase is. Nothing outside of its folder changes before LANDING."""

    CARRYING = "carrying"
    PROVING = "proving"
    LANDING = "landing"


@dataclass(frozen=True)
class Result:
    """What became of one fix, and why: `proof` is what tests said, `hints` what texts did.

    `source` is the release that it was carried from; empty where it was not.
    """

    fix: str
    status: Status
    proof: Stock = Stock.NOT_RUN
    hints: tuple[str, ...] = ()
    source: str = ""


@dataclass
class State:
    """One rebase.

    Attributes:
        release: Where the fixes are carried to.
        sources: The releases whose fixes are carried, the preferred one first.
        why: Why that is preferred.
        origin: The clone of vLLM that was named, if any.
        stock: What the tests said of each fix on the stock release.
        results: One for each patch of the series that is done with, in order.
        stopped: The fix that a person is looking at.
        phase: How far it is.
    """

    release: str
    sources: list[str]
    why: str
    origin: str | None
    stock: dict[str, Stock]
    results: list[Result] = field(default_factory=list)
    stopped: Result | None = None
    phase: Phase = Phase.CARRYING

    def save(self, path: Path = STATE) -> None:
        """Write it in one step."""
        document = json.dumps(asdict(self), default=lambda member: member.value, indent=2)
        replace_text(path, document + "\n")


def forget() -> None:
    """Remove a rebase's folder: its state first, so that nobody goes on with a part of the rest."""
    STATE.unlink(missing_ok=True)
    shutil.rmtree(WORK, ignore_errors=True)


def load_state(path: Path = STATE) -> State:
    """Read what was saved.

    Raises:
        UsageError: There is no rebase, or its file is damaged.
    """
    if not path.is_file():
        raise UsageError(
            "there is no rebase to go on with",
            expected=f"a worktree in {WORK.relative_to(ROOT)}",
            next_step=f"see what one would do: nox -s rebase -- {not_carried()} --dry-run",
        )
    document = read_json(path, next_step="give it up: nox -s rebase -- --abort")
    stopped = document["stopped"]
    return State(
        **{name: document[name] for name in ("release", "sources", "why", "origin")},
        stock={fix: Stock(said) for fix, said in document["stock"].items()},
        results=[_result(row) for row in document["results"]],
        stopped=_result(stopped) if stopped else None,
        phase=Phase(document["phase"]),
    )


def _result(row: dict[str, str]) -> Result:
    return Result(
        row["fix"],
        Status(row["status"]),
        Stock(row["proof"]),
        tuple(row["hints"]),
        row["source"],
    )

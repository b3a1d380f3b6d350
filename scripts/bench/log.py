"""How many lines of log 10,000 bad requests cost a decode server, stock and patched."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.patchset.target import Target
from scripts.project import ROOT
from scripts.prove.environment import Environment, stage
from scripts.system.console import err
from scripts.system.process import run
from scripts.upstream.tree import read_source

_KINDS = (
    "parameters that cannot be used",
    "too few blocks",
    "refused for its length",
    "the same, of a P that is gone",
    "parameters of another request",
    "a P that is gone",
)
"""Those of `tests.programs.log_lines`."""

_REQUESTS = 10_000
_LIMIT = 100
_PATIENCE_S = 3000


@dataclass(frozen=True)
class LogReport:
    """What a loop of bad requests of each kind puts into the log.

    Attributes:
        stock: By kind: `sent`, `lines`, `ours` of these, `kinds`, `seconds` and `ended`, see there.
        patched: The same of the patched files.
    """

    release: str
    requests: int
    stock: dict[str, dict[str, Any]]
    patched: dict[str, dict[str, Any]]

    def rows(self) -> dict[str, str]:
        """Return what was measured, for a table."""
        return {
            f"lines for {self.requests:,} requests: {kind}": (
                f"{_said(self.stock[kind])} on stock, {_said(self.patched[kind])} patched, "
                f"{self.patched[kind]['ours']} of them ours ({_LIMIT} at most)"
            )
            for kind in _KINDS
        }

    @property
    def is_within_limits(self) -> bool:
        """Whether nobody can fill the log with our lines, or end a patched engine."""
        patched = self.patched.values()
        return all(one["ours"] <= _LIMIT and not one["ended"] for one in patched)


def _said(measured: dict[str, Any]) -> str:
    ended = f", and the engine ended after {measured['sent']}" if measured["ended"] else ""
    return f"{measured['lines']:,}{ended}"


def measure_log(release: str) -> LogReport:
    """Send both builds the same requests of each kind, in a process for each."""
    environment = Environment(release).make()
    patches = Target.of(release).patches
    folder = ROOT / ".nox" / f"bench-log-{release}"
    files = {path for patch in patches for path in patch.files}
    try:
        # Whatever is installed.
        stock = {path: read_source(release, path).encode() for path in files}
        of_stock = _measured(environment, environment.shadow_of(folder, stock))
        of_patched = _measured(environment, environment.shadow(folder, patches))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return LogReport(release, _REQUESTS, of_stock, of_patched)


def _measured(environment: Environment, shadow: Path) -> dict[str, dict[str, Any]]:
    measured = {}
    for kind in _KINDS:
        err.print(f"measuring the log: {kind} ...")
        result = run(
            [
                environment.python, "-W", "ignore", "-m", "tests.programs.log_lines",
                kind, str(_REQUESTS),
            ],
            cwd=stage(),
            env=environment.variables(shadow),
            timeout=_PATIENCE_S,
        )  # fmt: skip
        measured[kind] = json.loads(result.stdout.splitlines()[-1])
    return measured

"""What the patched API server's event loop spends on one large request."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass

from scripts.patchset.target import Target
from scripts.project import ROOT
from scripts.prove.environment import Environment, stage
from scripts.system.console import err
from scripts.system.process import run

_LIMIT = 0.75
_TURNS = 100


@dataclass(frozen=True)
class ServingReport:
    """What is looked at in a request's parameters before they are sent to the engine core.

    Attributes:
        check_over_parse: for 131,072 token ids, over the time of reading that body as JSON.
        parse_milliseconds: the latter, so that the ratio has a scale.
    """

    release: str
    turns: int
    check_over_parse: float
    parse_milliseconds: float

    def rows(self) -> dict[str, str]:
        """Return what was measured, for a table."""
        ratio = f"{self.check_over_parse} of {self.parse_milliseconds} ms ({_LIMIT} at most)"
        return {"check of 131,072 token ids / json.loads": ratio}

    @property
    def is_within_limits(self) -> bool:
        """Whether it costs no more than kvfix promises."""
        return self.check_over_parse <= _LIMIT


def measure_serving(release: str) -> ServingReport:
    """Measure the checks of a large request, and reading it, in turns in one process."""
    err.print("measuring the API server ...")
    environment = Environment(release).make()
    folder = ROOT / ".nox" / f"bench-serving-{release}"
    try:
        shadow = environment.shadow(folder, Target.of(release).patches)
        result = run(
            [environment.python, "-m", "tests.programs.loop_path", str(_TURNS)],
            cwd=stage(),
            env=environment.variables(shadow),
            timeout=300,
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    seconds = json.loads(result.stdout.splitlines()[-1])
    return ServingReport(
        release=release,
        turns=_TURNS,
        check_over_parse=round(seconds["check"] / seconds["parse"], 2),
        parse_milliseconds=round(seconds["parse"] * 1000, 1),
    )

"""What patched worker and scheduler cost where nothing fails.

How long a call takes, stock and patched, and what the overlay adds to the start of vLLM: the import
time of every module that the stock one does not load.
"""

from __future__ import annotations

import re
import statistics
from dataclasses import dataclass
from pathlib import Path

from scripts.bench.pairs import measure_pairs
from scripts.patchset.target import Target
from scripts.project import ROOT
from scripts.prove.environment import Environment, stage
from scripts.system.process import run

_PAIRS = 5
_CALLS = [
    f"{call} {count}"
    for call in ("get_finished", "start_load_kv", "running", "receiving")
    for count in (0, 64, 512)
]
_NEXT_TO_NOTHING = ("running 0", "receiving 0")
"""Steps of some 10 and 25 µs, which no engine takes without a model's milliseconds beside them, if
at all. Their limit is not a ratio, but `_MICROSECONDS` more than on stock."""
_MICROSECONDS = 5.0
_WORKER = "vllm.distributed.kv_transfer.kv_connector.v1.nixl.worker"
_IMPORT = re.compile(r"import time:\s+(?P<own>\d+) \|\s+\d+ \|\s+(?P<module>\S+)")


@dataclass(frozen=True)
class WorkerReport:
    """What the patched worker and scheduler cost.

    Attributes:
        turns: how often each call was measured, in all pairs of processes together.
        patched_over_stock: by call and number of requests, the median ratio of times.
        stock_microseconds: by the same, what a call takes on stock, so that ratios have a scale.
        import_milliseconds: what the modules cost at start that stock does not load.
    """

    release: str
    turns: int
    patched_over_stock: dict[str, float]
    stock_microseconds: dict[str, float]
    import_milliseconds: float

    def rows(self) -> dict[str, str]:
        """Return what was measured, for a table."""
        ratios = {
            f"{call}, patched / stock": f"{ratio:.3f} of {self.stock_microseconds[call]} µs"
            for call, ratio in self.patched_over_stock.items()
        }
        return {**ratios, "imports at start": f"{self.import_milliseconds} ms (5 at most)"}

    @property
    def is_within_limits(self) -> bool:
        """Whether nothing costs more than kvfix promises."""
        return self.import_milliseconds <= 5 and all(
            (ratio - 1) * self.stock_microseconds[call] <= _MICROSECONDS
            if call in _NEXT_TO_NOTHING
            else ratio <= 1.03
            for call, ratio in self.patched_over_stock.items()
        )


def measure_worker(release: str, turns: int) -> WorkerReport:
    """Measure stock and patched in turns, in the environment of `release`.

    Args:
        release: of vLLM.
        turns: of each pair of processes.
    """
    environment = Environment(release).make()
    environment.install(environment.stock)
    patches = Target.of(release).patches
    shadow = environment.shadow(ROOT / ".nox" / f"bench-{release}", patches)
    program = ("tests.programs.hot_path",)
    times = measure_pairs(environment, shadow, program, _CALLS, pairs=_PAIRS, turns=turns)
    return WorkerReport(
        release=release,
        turns=turns * _PAIRS,
        patched_over_stock={call: taken.ratio for call, taken in times.items()},
        stock_microseconds={call: taken.stock_microseconds for call, taken in times.items()},
        import_milliseconds=_import_cost(environment, shadow),
    )


def _import_cost(environment: Environment, shadow: Path) -> float:
    """Return milliseconds for the modules that only the patched worker imports, median of 3."""

    def imported(folder: Path | None) -> dict[str, int]:
        code = f"from tests.support import vllm_cpu; vllm_cpu.prepare(); import {_WORKER}"
        result = run(
            [environment.python, "-W", "ignore", "-X", "importtime", "-c", code],
            cwd=stage(),
            env=environment.variables(folder),
            timeout=300,
        )
        return {match["module"]: int(match["own"]) for match in _IMPORT.finditer(result.stderr)}

    stock = imported(None).keys()
    costs = [
        sum(own for module, own in imported(shadow).items() if module not in stock)
        for _ in range(3)
    ]
    return round(statistics.median(costs) / 1000, 2)

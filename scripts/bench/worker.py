"""The second half of `nox -s bench`: what the patched worker costs where nothing fails.

Two processes, one on the stock files and one with the whole series, answer in turns how long a
call takes; the figure is the median of the ratios of each turn. A process is some per cent faster
or slower than another of the same code as long as it lives (by where its memory lies), so there
are several pairs of them. Beside it, what the overlay adds to the start of vLLM: the import time
of every module that the stock one does not load.
"""

from __future__ import annotations

import re
import statistics
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.patchset.target import Target
from scripts.project import ROOT
from scripts.prove.environment import Environment, stage
from scripts.system.console import err
from scripts.system.errors import CheckFailedError
from scripts.system.process import run, talking

if TYPE_CHECKING:
    from subprocess import Popen

_PAIRS = 5
_CALLS = [f"{call} {count}" for call in ("get_finished", "start_load_kv") for count in (0, 64, 512)]
_WORKER = "vllm.distributed.kv_transfer.kv_connector.v1.nixl.worker"
_IMPORT = re.compile(r"import time:\s+(?P<own>\d+) \|\s+\d+ \|\s+(?P<module>\S+)")


@dataclass(frozen=True)
class WorkerReport:
    """What the patched worker costs.

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
        return max(self.patched_over_stock.values()) <= 1.03 and self.import_milliseconds <= 5


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
    times: dict[str, list[tuple[float, float]]] = {call: [] for call in _CALLS}
    for pair in range(_PAIRS):
        err.print(f"measuring the worker: pair {pair + 1} of {_PAIRS} ...")
        with _process(environment, None) as stock, _process(environment, shadow) as patched:
            _await_ready(stock)
            _await_ready(patched)
            for call in _CALLS:  # warms both
                _ask(stock, call), _ask(patched, call)
            for turn in range(turns):
                for call in _CALLS:
                    first, second = (stock, patched) if turn % 2 else (patched, stock)
                    answers = {id(first): _ask(first, call), id(second): _ask(second, call)}
                    times[call].append((answers[id(patched)], answers[id(stock)]))
    return WorkerReport(
        release=release,
        turns=turns * _PAIRS,
        patched_over_stock={
            call: round(statistics.median(p / s for p, s in pairs), 3)
            for call, pairs in times.items()
        },
        stock_microseconds={
            call: round(statistics.median(s for _, s in pairs) / 1000, 2)
            for call, pairs in times.items()
        },
        import_milliseconds=_import_cost(environment, shadow),
    )


def _process(environment: Environment, shadow: Path | None) -> AbstractContextManager[Popen[str]]:
    words = (environment.python, "-W", "ignore", "-m", "tests.programs.hot_path")
    return talking(words, cwd=stage(), env=environment.variables(shadow))


def _await_ready(process: Popen[str]) -> None:
    while _line(process) != "ready":
        pass  # vLLM logs to the same stream


def _line(process: Popen[str]) -> str:
    line = process.stdout.readline() if process.stdout else ""
    if not line:
        raise CheckFailedError(
            f"the measured process ended with {process.wait()}",
            expected="an answer",
            next_step="see what it printed above",
        )
    return line.strip()


def _ask(process: Popen[str], call: str) -> float:
    if process.stdin:
        process.stdin.write(f"{call}\n")
        process.stdin.flush()
    return float(_line(process))


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

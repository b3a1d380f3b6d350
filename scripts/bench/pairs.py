"""Two processes that do the same, one on the stock files and one patched, asked in turns.

A process is some per cent faster or slower than another of the same code as long as it lives, by
where its memory lies, so there are several pairs of them; the figure is the median of the ratios of
each turn.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.prove.environment import Environment, stage
from scripts.system.console import err
from scripts.system.errors import CheckFailedError
from scripts.system.process import talking

if TYPE_CHECKING:
    from subprocess import Popen


@dataclass(frozen=True)
class Times:
    """How long something took, in nanoseconds, in each turn.

    Attributes:
        turns: Of the patched process, and of the stock one.
    """

    turns: Sequence[tuple[float, float]]

    @property
    def ratio(self) -> float:
        """The median of patched over stock."""
        return round(statistics.median(patched / stock for patched, stock in self.turns), 3)

    @property
    def stock_microseconds(self) -> float:
        """The median on stock, so that the ratio has a scale."""
        return round(statistics.median(stock for _, stock in self.turns) / 1000, 2)


def measure_pairs(
    environment: Environment,
    shadow: Path,
    program: Sequence[str],
    questions: Sequence[str],
    *,
    pairs: int,
    turns: int,
) -> Mapping[str, Times]:
    """Ask both processes of each pair every question in each turn.

    Args:
        environment: Has the stock vLLM.
        shadow: Where the patched one lies in it.
        program: A module of tests.programs and its arguments. It prints `ready`, then nanoseconds
            for each line that it reads.
        questions: Those lines.
        pairs: Of processes, one after the other.
        turns: Of each pair.

    Raises:
        CheckFailedError: A process ended.
    """
    times: dict[str, list[tuple[float, float]]] = {question: [] for question in questions}
    words: list[str | Path] = [environment.python, "-W", "ignore", "-m", *program]
    for pair in range(pairs):
        err.print(f"measuring {program[0]}: pair {pair + 1} of {pairs} ...")
        with (
            talking(words, cwd=stage(), env=environment.variables(None)) as stock,
            talking(words, cwd=stage(), env=environment.variables(shadow)) as patched,
        ):
            for process in (stock, patched):
                while _line(process) != "ready":
                    pass  # vLLM logs to the same stream
            for question in questions:  # warms both
                _ask(stock, question), _ask(patched, question)
            for turn in range(turns):
                for question in questions:
                    first, second = (stock, patched) if turn % 2 else (patched, stock)
                    answers = {id(one): _ask(one, question) for one in (first, second)}
                    times[question].append((answers[id(patched)], answers[id(stock)]))
    return {question: Times(taken) for question, taken in times.items()}


def _line(process: Popen[str]) -> str:
    line = process.stdout.readline() if process.stdout else ""
    if not line:
        raise CheckFailedError(
            f"the measured process ended with {process.wait()}",
            expected="an answer",
            next_step="see what it printed above",
        )
    return line.strip()


def _ask(process: Popen[str], question: str) -> float:
    if process.stdin:
        process.stdin.write(f"{question}\n")
        process.stdin.flush()
    return float(_line(process))

"""Runs of pytest in an environment with vLLM, and what became of each test."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.project import ROOT
from scripts.prove.environment import Environment, stage
from scripts.prove.forks import Fork, run_in_forks
from scripts.prove.outcomes import Outcome, Outcomes, outcomes_of
from scripts.system.process import Finished, run

PLUGIN = "tests.support.vllm_cpu"
RAISED = "tests.support.raised"
"""The plugin that notes who raised what a test failed with."""
FROZEN = "tests.support.frozen"
"""The plugin that spares what imports have made from the search for garbage."""
PLUGINS = (PLUGIN, RAISED, FROZEN)
"""What our tests run with; all of them can change an outcome."""
FLAGS = ("-q", "--continue-on-collection-errors", "--tb=line")
"""pytest's flags where outcomes are kept. A file that cannot be collected must not keep the
others from running. Of a failure counts where it is and what it says; pytest takes longer to quote
the code than to run the tests."""
WHOLE_RUN = (0, 1)
"""Exit codes of pytest when all that was collected has run."""


def run_pytest(
    environment: Environment, paths: list[str], *, shadow: Path | None = None, timeout: float = 1800
) -> dict[str, Outcome]:
    """Run the tests below `paths` and return their outcomes by node id.

    Args:
        environment: Whose Python runs them, with the vLLM that is installed there.
        paths: Files or folders, relative to the repository.
        shadow: A folder whose `vllm` hides the installed one.
        timeout: Seconds for the whole run.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log.jsonl")
        result = start_pytest(environment, _words(paths, log), shadow=shadow, timeout=timeout)
        return _outcomes(log, result, paths)


@dataclass(frozen=True)
class Run:
    """A run of the tests below `paths`; the `vllm` of `shadow`, if any, hides the installed one.

    `words` are more of pytest's.
    """

    paths: Sequence[str]
    shadow: Path | None = None
    words: Sequence[str] = ()


def run_together(
    environment: Environment, runs: Mapping[str, Run], *others: Fork, timeout: float = 1800
) -> tuple[dict[str, Outcomes], list[Finished]]:
    """Do `runs` and `others`, some at a time.

    Args:
        environment: Whose Python runs them.
        runs: Runs of pytest by name.
        others: What runs along.
        timeout: Seconds for each.

    Returns:
        The outcomes of each run by node id, and what became of the others.
    """
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, f"{number}.jsonl") for number in range(len(runs))]
        forks = [
            in_fork([*run.words, *_words(run.paths, log)], run.shadow)
            for run, log in zip(runs.values(), logs, strict=True)
        ]
        ended = run_in_forks(environment, [*forks, *others], timeout=timeout)
        outcomes = {
            name: _outcomes(log, result, run.paths)
            for (name, run), log, result in zip(runs.items(), logs, ended, strict=False)
        }
    return outcomes, ended[len(runs) :]


def _words(paths: Sequence[str], log: Path) -> list[str]:
    return [*FLAGS, "--report-log", str(log), *(f"{ROOT}/{path}" for path in paths)]


def _outcomes(log: Path, result: Finished, paths: Sequence[str]) -> Outcomes:
    outcomes = outcomes_of(log) if log.is_file() else {}
    if result.returncode not in WHOLE_RUN or not outcomes:
        said = (result.stdout + result.stderr).strip()[-2000:]
        message = f"pytest ended with {result.returncode}: {said}"
        outcomes.update((path, Outcome("error", "", message, "harness")) for path in paths)
    return outcomes


def start_pytest(
    environment: Environment,
    words: list[str],
    *,
    shadow: Path | None = None,
    timeout: float | None = None,
    stream: bool = False,
) -> Finished:
    """Run pytest with the command-line `words` where the installed vLLM is what is imported."""
    return run(
        [environment.python, "-m", *_arguments(words)],
        cwd=stage(),
        env=environment.variables(shadow),
        timeout=timeout,
        check=False,
        stream=stream,
    )


def in_fork(words: Sequence[str], shadow: Path | None = None) -> Fork:
    """Return a run of pytest with `words`, as `start_pytest` would do it in a fresh process."""
    return Fork(_arguments(words), shadow)


def _arguments(words: Sequence[str]) -> list[str]:
    """Return pytest and its words for our tests, as they stand after `python -m`."""
    plugins = [word for plugin in PLUGINS for word in ("-p", plugin)]
    return pytest_arguments(*plugins, *words)


def pytest_arguments(*words: str) -> list[str]:
    """Return pytest with the repository's settings, as it stands after `python -m`."""
    return [
        "pytest", "-p", "no:cacheprovider",
        "--config-file", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), *words,
    ]  # fmt: skip

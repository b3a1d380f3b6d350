"""One run of pytest in an environment with vLLM, and what became of each test."""

from __future__ import annotations

import tempfile
from pathlib import Path

from scripts.project import ROOT
from scripts.prove.environment import Environment, stage
from scripts.prove.outcomes import Outcome, outcomes_of
from scripts.system.process import Finished, run

PLUGIN = "tests.support.vllm_cpu"
RAISED = "tests.support.raised"
"""The plugin that notes who raised what a test failed with."""
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
        # A file that cannot be collected must not keep the others from running.
        options = ["-q", "--continue-on-collection-errors", "--report-log", str(log)]
        words = [*options, *(str(ROOT / path) for path in paths)]
        result = start_pytest(environment, words, shadow=shadow, timeout=timeout)
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
        pytest_command(environment.python, "-p", PLUGIN, "-p", RAISED, *words),
        cwd=stage(),
        env=environment.variables(shadow),
        timeout=timeout,
        check=False,
        stream=stream,
    )


def pytest_command(python: Path, *words: str) -> list[str | Path]:
    """Return the command that runs pytest with the repository's settings."""
    return [
        python, "-m", "pytest", "-p", "no:cacheprovider",
        "--config-file", ROOT / "pyproject.toml", "--rootdir", ROOT, *words,
    ]  # fmt: skip

"""Do the processes of a patched build start, each with the module that it imports first?

Tests import what they test, in an order of their own. A server, an engine core and a worker each
begin somewhere else, and what cannot be imported from there ends them before they say a word.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from scripts.prove.forks import Fork
from scripts.system.errors import CheckFailedError
from scripts.system.process import Finished

_FIRST = (
    "vllm.entrypoints.openai.api_server",
    "vllm.entrypoints.llm",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.gpu_worker",
)


def starting(patched: Path) -> list[Fork]:
    """Return the runs that import each of these modules before any other, from `patched`."""
    return [Fork(["tests.programs.first_import", module], patched) for module in _FIRST]


def check_starts(release: str, ended: Sequence[Finished]) -> None:
    """Look at what became of the runs of `starting`, if there were any.

    Raises:
        CheckFailedError: A module could not be imported.
    """
    for module, run in zip(_FIRST, ended, strict=bool(ended)):
        if run.returncode:
            said = (run.stderr.strip() or f"exit code {run.returncode}").splitlines()[-1]
            raise CheckFailedError(
                f"patched {release}: no process starts with {module}: {said}",
                expected="a module that can be imported before any other",
                next_step="see what is imported in a circle: nox -s lint",
            )

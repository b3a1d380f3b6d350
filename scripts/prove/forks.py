"""Runs inside an environment with vLLM that share one start of Python: tests/programs/forks.py."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.prove.environment import Environment, stage
from scripts.system.errors import CommandError
from scripts.system.process import Finished, in_own_group

PROGRAM = "tests.programs.forks"
AT_ONCE = min(8, 3 * (os.cpu_count() or 1))
"""Runs at a time: each is one process, waits for most of its time, and takes 0.5 GB of its own."""


@dataclass(frozen=True)
class Fork:
    """One run.

    Attributes:
        arguments: A module and its words, as after `python -m`.
        shadow: A folder whose `vllm` hides the installed one; None for the installed one.
    """

    arguments: Sequence[str]
    shadow: Path | None = None


def run_in_forks(
    environment: Environment, runs: Sequence[Fork], *, timeout: float
) -> list[Finished]:
    """Run all of `runs` to their ends, `AT_ONCE`, and return what became of each.

    What ends this process or this call ends them as well.

    Args:
        environment: Whose Python runs them.
        runs: What to run.
        timeout: Seconds after which a run is killed; it ends with -9 then.

    Raises:
        CommandError: They could not be started.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        temporary = {"TMPDIR": name}  # a fork ends without what removes its folders
        wanted = [
            {
                "arguments": list(run.arguments),
                "variables": environment.variables(run.shadow) | temporary,
                "seconds": timeout,
            }
            for run in runs
        ]
        (folder / "runs.json").write_text(json.dumps(wanted), encoding="utf-8")
        command = [str(environment.python), "-m", PROGRAM, name, str(AT_ONCE)]
        said = folder / "said"
        with (
            said.open("w", encoding="utf-8") as output,
            in_own_group(
                command, cwd=stage(), env=environment.variables(None) | temporary, output=output
            ) as process,
        ):
            code = process.wait()
        if code:
            text = said.read_text(encoding="utf-8", errors="replace")
            raise CommandError(
                f"{PROGRAM} exited with {code}:\n{text[-4000:]}",
                expected="exit code 0",
                next_step="read what it says; a run by itself: nox -s tests -- tests/overlay",
            )
        return [_finished(folder, number, run) for number, run in enumerate(runs)]


def _finished(folder: Path, number: int, run: Fork) -> Finished:
    code, out, err = (
        (folder / f"{number}.{end}").read_text(encoding="utf-8", errors="replace")
        for end in ("code", "out", "err")
    )
    return Finished(list(run.arguments), int(code), out, err)

"""The one way in which the tools start other programs."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts.system.errors import CommandError


def run(
    command: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
    check: bool = True,
    stream: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run `command` to its end and return what it printed, as text.

    Args:
        command: Program and arguments; never passed through a shell.
        cwd: Working directory.
        env: Variables to set on top of this process's own.
        timeout: Seconds after which the command is killed.
        check: Whether a non-zero exit is an error.
        stream: Let the user see what it prints, rather than return it.

    Raises:
        CommandError: The exit code is not zero, and `check` is set; or the time is up.
    """
    words = [os.fspath(word) for word in command]
    try:
        result = subprocess.run(
            words,
            cwd=cwd,
            env={**os.environ, **(env or {})},
            timeout=timeout,
            check=False,
            capture_output=not stream,
            text=True,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as error:
        raise CommandError(
            f"{words[0]} did not end within {timeout:g} s",
            expected="an end in that time",
            next_step=f"run it by hand: {' '.join(words)}",
        ) from error
    if check and result.returncode != 0:
        raise CommandError(
            f"{words[0]} exited with {result.returncode}:\n"
            f"{(result.stderr or result.stdout or '')[-4000:]}",
            expected="exit code 0",
            next_step=f"run it by hand: {' '.join(words)}",
        )
    return result

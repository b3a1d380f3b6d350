"""The one place from which the tools start other programs."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from scripts.system.errors import CommandError

Finished = subprocess.CompletedProcess[str]
"""A program that has ended, and what it printed."""


def run(
    command: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
    check: bool = True,
    stream: bool = False,
) -> Finished:
    """Run `command` to its end and return what it printed, as text.

    Args:
        command: Program and arguments; never passed through a shell.
        cwd: Working directory.
        env: Variables to set on top of this process's own.
        timeout: Seconds after which the command is killed.
        check: Whether a non-zero exit is an error.
        stream: Let the user see what it prints, rather than return it.

    Raises:
        CommandError: There is no such program; or its exit code is not zero, and `check` is set; or
            the time is up.
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
    except FileNotFoundError as error:
        if error.filename != words[0]:
            raise
        raise CommandError(
            f"{words[0]} is not installed",
            expected=f"{words[0]} on the PATH: nox puts it there",
            next_step="run the session with nox, which installs what it needs",
        ) from error
    except subprocess.TimeoutExpired as error:
        raise CommandError(
            f"{words[0]} did not end within {timeout:g} s",
            expected="an end in that time",
            next_step=f"run it by hand: {shlex.join(words)}",
        ) from error
    if check and result.returncode != 0:
        raise CommandError(
            f"{words[0]} exited with {result.returncode}:\n"
            f"{(result.stderr or result.stdout or '')[-4000:]}",
            expected="exit code 0",
            next_step=f"run it by hand: {shlex.join(words)}",
        )
    return result


@dataclass(frozen=True)
class Usage:
    """What a shell command took: exit code, seconds by the clock and of CPUs, peak memory."""

    exit_code: int
    seconds: float
    cpu_seconds: float
    peak_bytes: float


def measure(command: str, *, cwd: Path) -> Usage:
    """Run a command of `sh` to its end, without what it prints to its output, and measure it."""
    start = time.perf_counter()
    with subprocess.Popen(["sh", "-c", command], cwd=cwd, stdout=subprocess.DEVNULL) as process:
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes
    cpu_seconds = usage.ru_utime + usage.ru_stime
    return Usage(process.returncode, seconds, cpu_seconds, usage.ru_maxrss * unit)


@contextmanager
def talking(
    command: Sequence[str | Path], *, cwd: Path, env: Mapping[str, str]
) -> Iterator[subprocess.Popen[str]]:
    """Run a program that answers line by line while the block runs; then it is killed."""
    process = subprocess.Popen(
        command, cwd=cwd, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextmanager
def in_own_group(
    command: Sequence[str], *, cwd: Path, env: Mapping[str, str], output: IO[str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program while the block runs; then it and all that it has started are killed."""
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

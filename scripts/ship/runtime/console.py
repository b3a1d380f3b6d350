"""What an installer says: whoever reads it or does not changes nothing of what was done."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import TextIO

PYTHON = sys.executable or "python3"
"""What a command that is printed begins with: the one that runs this."""


def show_all() -> None:
    """Let letters that an encoding does not have be shown by their numbers; they are no error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def say(text: str, *, failed: bool) -> None:
    """Print what was done, or on stderr what has failed; where stdout takes nothing, there too."""
    streams: list[TextIO | None] = [sys.stderr] if failed else [sys.stdout, sys.stderr]
    for stream in streams:
        if stream is None:  # closed by whoever started this
            continue
        try:
            print(text, file=stream, flush=True)
        except OSError:  # nobody reads on, or a full disk
            _drop(stream)
        else:
            return


def _drop(stream: TextIO) -> None:
    # Python tries again at its end, and would end with 120.
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

"""Ctrl-C and SIGTERM: the first one ends an installer, and none disturbs what that cleans up."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

_NUMBERS = (signal.SIGINT, signal.SIGTERM)


def end_once() -> None:
    """From here on, let the first signal end the process with its code, and ignore the others."""
    for number in _NUMBERS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as in a script's background
            signal.signal(number, _end)


def _end(number: int, _: object) -> NoReturn:
    for each in _NUMBERS:
        signal.signal(each, signal.SIG_IGN)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Let no signal end what mends the last one."""
    before = [signal.signal(number, signal.SIG_IGN) for number in _NUMBERS]
    try:
        yield
    finally:
        for number, handler in zip(_NUMBERS, before, strict=True):
            signal.signal(number, handler)

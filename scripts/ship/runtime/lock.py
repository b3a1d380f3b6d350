"""Who may be at work in a site folder: one installer that writes, or any number that look."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .refusal import STORAGE, RefusalError

PATIENCE = 15.0
"""Seconds that one waits for another: several times what an installation takes."""
_PAUSE = 0.1


@contextmanager
def alone(site: Path) -> Iterator[None]:
    """Keep other installers out; the system frees a dead one's lock.

    Raises:
        RefusalError: Another one is still at work after `PATIENCE`.
    """
    with _locked(site, fcntl.LOCK_EX):
        yield


@contextmanager
def beside_readers(site: Path) -> Iterator[None]:
    """Keep out who writes, and nobody else.

    Raises:
        RefusalError: One is still at work after `PATIENCE`.
    """
    with _locked(site, fcntl.LOCK_SH):
        yield


@contextmanager
def _locked(site: Path, kind: int) -> Iterator[None]:
    folder = os.open(site, os.O_RDONLY)
    try:
        until = time.monotonic() + PATIENCE
        while not _has_locked(folder, kind):
            if time.monotonic() > until:
                raise RefusalError(
                    STORAGE,
                    f"another installer of kvfix is at work in {site}",
                    f"its end within {PATIENCE:.0f} s",
                    "look what keeps it, then run this again",
                )
            time.sleep(_PAUSE)
        yield
    finally:
        os.close(folder)


def _has_locked(folder: int, kind: int) -> bool:
    try:
        fcntl.flock(folder, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks
    return True

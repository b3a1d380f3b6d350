"""What the two builds of a comparison write for each other: bytes, below a folder of the run."""

from __future__ import annotations

import time
from pathlib import Path

from tests.parity.scenario import LeftOutError

_folder: Path | None = None
_sides: tuple[str, str] = ("", "")


def settle(folder: Path | None, mine: str, other: str) -> None:
    """Say where both builds write, and which one this is."""
    global _folder, _sides
    _folder, _sides = folder, (mine, other)


def exchange(name: str, data: bytes) -> bytes:
    """Leave `data` for the other build's scenario of this name and return what that one leaves.

    Raises:
        LeftOutError: this build runs alone.
        RuntimeError: the other one ended without having written it.
    """
    if _folder is None:
        raise LeftOutError("there is no other build to exchange anything with")
    mine, theirs = (_folder / f"{name}.{side}" for side in _sides)
    part = mine.with_suffix(".part")
    part.write_bytes(data)
    part.replace(mine)
    ended = _folder / f"{_sides[1]}.ended"
    while not theirs.is_file():
        if ended.is_file() and not theirs.is_file():
            raise RuntimeError(f"{_sides[1]} ended and has left nothing under {name}")
        time.sleep(0.1)
    return theirs.read_bytes()

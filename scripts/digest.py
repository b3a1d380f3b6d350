"""The sha256 of a file, read once and never held in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

_CHUNK = 1 << 20  # bytes; from here on a bigger buffer no longer makes hashing faster


def sha256(path: Path, on_progress: Callable[[int], None] | None = None) -> str:
    """Return the sha256 of the file at `path` as 64 lower-case hexadecimal digits.

    Args:
        path: The file.
        on_progress: Called after each piece with its length in bytes.
    """
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_CHUNK))
    # Unbuffered: the pieces are large already, a second copy of each would only cost time.
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            if on_progress is not None:
                on_progress(count)
    return digest.hexdigest()

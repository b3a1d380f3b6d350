from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from scripts.digest import sha256


@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, 1 << 20, (1 << 21) + 7])
def test_is_the_hash_of_the_whole_file(tmp_path: Path, size: int) -> None:
    content = bytes(index % 251 for index in range(size))
    path = tmp_path / "file"
    path.write_bytes(content)
    pieces: list[int] = []
    assert sha256(path, pieces.append) == hashlib.sha256(content).hexdigest()
    assert sum(pieces) == size
    assert all(0 < piece <= 1 << 20 for piece in pieces)

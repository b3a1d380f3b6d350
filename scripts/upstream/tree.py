"""The source tree of a release: its pinned sdist, unpacked once into the cache."""

from __future__ import annotations

import tarfile
from functools import cache
from pathlib import Path

from scripts.system.errors import RegistryError
from scripts.system.files import working_folder
from scripts.upstream.cache import cache_folder
from scripts.upstream.index import fetch
from scripts.upstream.lock import locked_release


@cache
def release_tree(release: str) -> Path:
    """Return the unpacked sdist of `release`: a folder that holds `vllm/`, `tests/` and so on.

    Raises:
        NotLockedError: The release is not pinned.
        NetworkError: The sdist is not in the cache and the index cannot be reached.
    """
    sdist = locked_release(release).sdist
    tree = cache_folder() / "trees" / sdist.sha256
    if not tree.is_dir():
        archive = fetch(sdist)
        tree.parent.mkdir(parents=True, exist_ok=True)
        with working_folder(tree) as part:
            with tarfile.open(archive) as tar:
                tar.extractall(part, filter="data")
            (top,) = part.iterdir()
            _install(top, tree)
    return tree


def _install(unpacked: Path, tree: Path) -> None:
    try:
        unpacked.rename(tree)
    except OSError:
        if not tree.is_dir():  # else another process was first, with the same bytes
            raise


def read_source(release: str, path: str) -> str:
    """Return the text of `path` in the sdist of `release`.

    Raises:
        RegistryError: The release has no such file.
    """
    file = release_tree(release) / path
    if not file.is_file():
        raise RegistryError(
            f"vLLM {release} has no file {path}",
            expected="a file that the series may change",
            next_step="carry the fix to where the code went, as CONTRIBUTING.md says",
        )
    return file.read_bytes().decode("utf-8")

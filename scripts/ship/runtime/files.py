"""Files and folders in somebody's environment: each is given to whom it has to belong to.

An installer may run as root, and whoever owns the environment uninstalls vLLM later.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

Owner = tuple[int, int]
"""The numbers of user and group."""
NOBODY_KNOWN = (-1, -1)
"""Of what earlier installers kept, which did not say."""
# Files of others; ids that a container does not have; file systems without owners.
_REFUSED = {errno.EPERM, errno.EACCES, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}


def owner_at(place: Path) -> Owner:
    """Return who owns a file or folder; of one that is not there, the folder it would go into."""
    while not place.exists():
        place = place.parent
    found = place.stat()
    return found.st_uid, found.st_gid


def give(place: Path, owner: Owner) -> None:
    """Let a file or folder belong to `owner`, as far as whoever runs this may decide that.

    It takes away setuid and setgid of a file: the mode comes afterwards.
    """
    if owner in (owner_at(place), NOBODY_KNOWN):
        return
    for asked in (owner, (-1, owner[1])):  # to a group of one's own that may be allowed
        try:
            os.chown(place, *asked)
            return
        except OSError as error:
            if error.errno not in _REFUSED:
                raise


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it; each belongs to whom the one above it belongs to."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir()
        give(folder, owner_at(folder.parent))


def write(path: Path, data: bytes, mode: int, owner: Owner) -> None:
    """Write a file, and bring it to the disk."""
    make_folder(path.parent)
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        give(path, owner)
        os.fchmod(file.fileno(), mode)
        os.fsync(file.fileno())


def move(source: Path, target: Path) -> None:
    """Put a file in the place of what is there."""
    make_folder(target.parent)
    source.replace(target)


def put_folder(source: Path, target: Path) -> None:
    """Put a new folder in the place of what is there.

    That goes file by file: a folder of a layer below cannot be renamed on overlayfs.
    """
    if target.is_dir():
        shutil.rmtree(target)
    source.rename(target)


def folders_of(folder: Path) -> Iterator[Path]:
    """Yield a folder and all that are below it, without those that are links."""
    yield folder
    for found in sorted(folder.rglob("*")):
        if found.is_dir() and not found.is_symlink():
            yield found


def remove_empty(folder: Path, site: Path) -> None:
    """Remove a folder in `site` and those above it, up to the first with something in it."""
    while folder != site:
        with suppress(OSError):
            (folder / "__pycache__").rmdir()
        try:
            folder.rmdir()
        except FileNotFoundError:
            pass
        except OSError:
            return
        folder = folder.parent


def byte_code(source: Path) -> list[Path]:
    """Return what Pythons have compiled of a module: some do not look whether it has changed."""
    if source.suffix != ".py":
        return []
    return sorted((source.parent / "__pycache__").glob(f"{source.stem}.*.pyc"))


def sync_folders(folders: Iterable[Path]) -> None:
    """Bring the renames in some folders to the disk."""
    for folder in sorted({*folders}):
        if folder.is_dir():
            sync(folder)


def sync(path: Path) -> None:
    """Bring a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

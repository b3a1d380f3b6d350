"""Files that appear whole or not at all, whatever kills the process that writes them."""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from scripts.system.console import err
from scripts.system.errors import UsageError

_MODE = 0o644  # said outright, so that the result does not depend on the caller's umask


@contextmanager
def replacing(target: Path) -> Iterator[BinaryIO]:
    """Yield an empty file that takes the place of `target` when the block ends well.

    Its `name` is its path. It lies beside `target`, for only within one file system is the rename
    atomic. It goes away when the block raises; what a killed process has left is removed by the
    next one, before it writes and after.

    Raises:
        OSError: The folder cannot be written, or is full; `target` is as it was.
    """
    sweep(target)
    descriptor, temporary = _create(target)
    try:
        with open(temporary, "wb", opener=lambda *_: descriptor) as file:
            yield file
            file.flush()
            os.fchmod(file.fileno(), _MODE)
            # Before the rename: a power cut must not leave the new name on missing data.
            os.fsync(file.fileno())
            temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
        sweep(target)  # another writer may have been killed meanwhile
    _fsync_folder(target.parent)


@contextmanager
def working_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder beside `target`, which may be renamed to it; then it goes away.

    What a killed process has left is removed as in `replacing`.
    """
    sweep(target)
    descriptor, folder = _create(target, _make_folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)
        sweep(target)


def read_json(path: Path, *, next_step: str) -> Any:  # noqa: ANN401 - what is in it
    """Return what a file of ours says.

    Raises:
        UsageError: It is no JSON; `next_step` is what the user may do then.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(
            f"{path} is no JSON: {error}",
            expected="the file as it was written",
            next_step=next_step,
        ) from error


@contextmanager
def only_process(folder: Path, what: str) -> Iterator[bool]:
    """Wait until no other process `what` (said to the user) in `folder`.

    The system frees a dead process's lock. Where a file system has no locks nobody waits, so what
    is written in the block has to be put in place whole. Yields whether it is the only one.
    """
    with (folder / ".lock").open("w") as lock:
        only = True
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            err.print(f"another process {what}; waiting for it", markup=False)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            only = False
        yield only


def _make_folder(suffix: str, prefix: str, parent: Path) -> tuple[int, str]:
    name = tempfile.mkdtemp(suffix, prefix, parent)
    return os.open(name, os.O_RDONLY), name


def _create(
    target: Path, make: Callable[[str, str, Path], tuple[int, str]] = tempfile.mkstemp
) -> tuple[int, Path]:
    while True:
        descriptor, name = make(".part", f".{target.name}.", target.parent)
        # The lock says that a writer lives. The kernel drops it when the process dies, and no
        # recycled process id can be mistaken for it. Some network file systems have no locks:
        # there a killed run's file stays until somebody removes it.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return descriptor, Path(name)
        os.close(descriptor)  # swept by another process before the lock was ours


def sweep(target: Path) -> None:
    """Remove what killed writers of `target` have left beside it."""
    for stale in target.parent.glob(f".{glob.escape(target.name)}.*.part"):
        with suppress(OSError), _held(stale):  # raises while its writer lives
            if stale.is_dir():
                shutil.rmtree(stale)
            else:
                stale.unlink()


@contextmanager
def _held(path: Path) -> Iterator[None]:
    # A folder cannot be opened for writing, and some network file systems lock no other file.
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_CHUNK = 1 << 20  # bytes; from here on a bigger buffer no longer makes hashing faster
_BIG_CHUNK = 1 << 25  # beside a thread that computes, which gives way only every 5 ms


def sha256(
    path: Path, on_progress: Callable[[int], None] | None = None, chunk: int = _CHUNK
) -> str:
    """Return the sha256 of the file at `path` as 64 lower-case hexadecimal digits.

    Args:
        path: The file.
        on_progress: Called after each piece with its length in bytes.
        chunk: How many bytes a piece has.
    """
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(chunk))
    # Unbuffered: the pieces are large already, a second copy of each would only cost time.
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            if on_progress is not None:
                on_progress(count)
    return digest.hexdigest()


@contextmanager
def sha256_beside(path: Path) -> Iterator[Future[str]]:
    """Yield the sha256 of the file at `path`, which another thread finds out meanwhile."""
    with ThreadPoolExecutor(1) as thread:
        yield thread.submit(sha256, path, chunk=_BIG_CHUNK)


@cache
def sha256_once(path: Path) -> str:
    """Return the sha256 of a file that does not change while this process runs."""
    return sha256(path)


def replace_text(path: Path, text: str) -> None:
    """Write `text` to `path` in one step; a file that says the same is left alone."""
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        sweep(path)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(text.encode())

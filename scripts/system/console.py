"""How the tools speak: one console, one progress bar, one place that turns errors into exits."""

from __future__ import annotations

import argparse
import errno
import io
import os
import select
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.text import Text

from scripts.system.errors import INTERRUPTED, TERMINATED, UNREAD, KvfixError, StorageError


def visible(text: str) -> str:
    """Return `text` with what a terminal would obey, or could not show, written as an escape.

    Names of files come from wheels, indexes and disks: none of them may move a cursor.
    """
    if text.isprintable():
        return text
    plain = (one if one.isprintable() or one in "\n\t" else ascii(one)[1:-1] for one in text)
    return "".join(plain)


class _Console(Console):
    """A console of which each text that it is given, in tables too, is made visible first."""

    def render_str(self, text: str, **how: Any) -> Text:  # noqa: ANN401
        return super().render_str(visible(text), **how)

    def on_broken_pipe(self) -> None:
        """Leave it to `entry`: rich would end with the code of a failure."""
        raise BrokenPipeError


# A path or a URL may well hold what is an emoji's name to rich, such as :bug:.
out = _Console(highlight=False, soft_wrap=True, emoji=False)
err = _Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)

_STORAGE = {
    errno.ENOSPC: "no space left",
    errno.EDQUOT: "quota exceeded",
    errno.EFBIG: "larger than this system lets a file become",
    errno.EROFS: "read-only file system",
    errno.EACCES: "permission denied",
    errno.EPERM: "not permitted",
    errno.ENOTDIR: "a file lies where a folder should",
    errno.EEXIST: "a file lies where a folder should",
    errno.EISDIR: "a folder lies where a file should",
    errno.EIO: "the device fails",
}
_PATH = {
    errno.ENAMETOOLONG: "the name is longer than this system takes",
    errno.ENOENT: "no such file or folder",
    errno.ELOOP: "links that lead in a circle",
}
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def parser_of(session: str, about: str | None) -> argparse.ArgumentParser:
    """Return a parser of what stands behind `nox -s session --`; `about` is the module's text."""
    return argparse.ArgumentParser(
        prog=f"nox -s {session} --",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def at_least(least: int) -> Callable[[str], int]:
    """Return what reads a whole number on a command line, as argparse's `type`."""

    def number(text: str) -> int:
        if (value := int(text)) < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        return value

    return number


def entry(main: Callable[[], None]) -> NoReturn:
    """Run one command and leave the process with its exit code."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # A TERM must unwind like Ctrl-C does, so that temporary files are removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    for stream in (sys.stdout, sys.stderr):  # None where the caller has closed it
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # what its encoding does not have
    try:
        code = _ended(main)
    except BrokenPipeError:
        if not _silence_unread():
            raise
        code = UNREAD
    sys.exit(code)


def _ended(main: Callable[[], None]) -> int | str | None:
    """Run one command, and return what the process is to be left with."""
    try:
        try:
            main()
        except SystemExit as end:
            code = end.code
        else:
            code = 0
        if sys.stdout is not None:
            sys.stdout.flush()  # not at the very end, where nobody is told that it failed
        return code
    except BrokenPipeError:
        raise
    except KvfixError as error:
        _print_error(error)
        return error.exit_code
    except OSError as error:
        known = storage_error(error)
        if known is None:
            raise
        _print_error(known)
        return known.exit_code
    except KeyboardInterrupt:
        err.print("[bold]Interrupted.[/] Nothing was left half done; the same command starts anew.")
        return INTERRUPTED


def _silence_unread() -> bool:
    """Have the output that nobody reads any more go nowhere; return whether there is such."""
    poll = select.poll()
    for descriptor in (1, 2):
        poll.register(descriptor, 0)
    unread = [one for one, event in poll.poll(0) if event & (select.POLLERR | select.POLLHUP)]
    for descriptor in unread:
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    return bool(unread)


def storage_error(error: OSError) -> StorageError | None:
    """Return what a user can do about a file or folder that fails; None for another error."""
    tail = "the cache goes where KVFIX_CACHE says, and what apply and export write where --out says"
    relative = error.filename is None or not Path(error.filename).is_absolute()
    if error.errno == errno.ENOENT and relative and not _is_somewhere():
        return StorageError(
            "the working directory is not there any more",
            expected="one that is",
            next_step="change to a folder that is there, then run the same command",
        )
    if isinstance(error, shutil.Error):  # of a folder that is copied: a row for each file
        _, where, reason = error.args[0][0]
        return StorageError(
            f"cannot write {where}: {reason}",
            expected="a folder with room for what is written",
            next_step=f"put that right, then run the same command; {tail}",
        )
    reason = _STORAGE.get(error.errno or 0)
    if reason is None:
        if error.filename is None:
            return None
        return StorageError(
            f"cannot use {error.filename}: {_PATH.get(error.errno or 0, error.strerror)}",
            expected="a path that is there, or can be made",
            next_step=f"put that right, or name another one, then run the same command; {tail}",
        )
    where = os.fspath(error.filename) if error.filename is not None else "the target folder"
    full = error.errno in _FULL
    return StorageError(
        f"cannot write {where}: {reason}",
        expected="a folder with room for what is written" if full else "a folder to write to",
        next_step=("free space there" if full else "put that right")
        + f", then run the same command; {tail}",
    )


def _is_somewhere() -> bool:
    try:
        Path.cwd()
    except FileNotFoundError:
        return False
    return True


def _print_error(error: KvfixError) -> None:
    err.print("[bold red]error:[/] ", end="")
    err.print(error.found, markup=False)
    err.print("expected: " + error.expected, markup=False)
    err.print("next: " + error.next_step, markup=False)


@contextmanager
def progress(label: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Show a bar over `total` bytes on a terminal; yield the function that advances it."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    shown = err.is_terminal  # elsewhere it would leave an empty line
    with Progress(
        *columns, TimeRemainingColumn(), console=err, transient=True, disable=not shown
    ) as bar:
        task = bar.add_task(visible(label), total=total)
        yield lambda count: bar.advance(task, count)

"""One class and one exit code for each way in which a command can fail.

Each error says three things: what was found, what was expected, and what to do next. A command in
the last is complete, so that it can be typed as it stands: it ends at a comma, a semicolon or the
end, a path in it is quoted for the shell, and only FILE and DIR are for the reader to replace.
tests/scripts/system/test_advice.py types them.

`scripts.system.console.entry` prints them and exits with `exit_code`; a traceback is a bug.
`docs/exit-codes.md` has all codes as a table.
"""

from __future__ import annotations

import signal
from typing import ClassVar

CARRIED = 32
"""`nox -s track`: releases were carried, and every branch is ready. No failure."""
INTERRUPTED = 128 + signal.SIGINT  # what shells report for Ctrl-C
TERMINATED = 128 + signal.SIGTERM
UNREAD = 128 + signal.SIGPIPE  # what they report where the reader of a pipe has gone


class KvfixError(Exception):
    """A failure that a user can act on."""

    exit_code: ClassVar[int] = 1

    def __init__(self, found: str, *, expected: str, next_step: str) -> None:
        super().__init__(found)
        self.found = found
        self.expected = expected
        self.next_step = next_step


class UsageError(KvfixError):
    """The command line does not say what to do: correct the argument that is named."""

    exit_code = 2


class UnknownReleaseError(KvfixError):
    """The version is no vLLM release that kvfix supports: take one that the message lists."""

    exit_code = 10


class NotCarriedError(KvfixError):
    """The release is known but the fixes were not carried to it: run `nox -s rebase` for it."""

    exit_code = 11


class NotLockedError(KvfixError):
    """The release or file is not pinned in `patches/upstream.lock`: run `nox -s lock` for it."""

    exit_code = 12


class HashMismatchError(KvfixError):
    """A file is not the one that is pinned: find out who changed it before anything else."""

    exit_code = 13


class BrokenWheelError(KvfixError):
    """The wheel is truncated, no zip, or breaks the wheel format: fetch or build it again."""

    exit_code = 14


class WrongReleaseError(KvfixError):
    """The wheel or tree is another release than the one asked for: name its own release."""

    exit_code = 15


class AlreadyPatchedError(KvfixError):
    """The wheel or tree already carries kvfix: start from the stock one."""

    exit_code = 16


class TouchedFileDiffersError(KvfixError):
    """Files that the series changes are not the release's own: carry the series to that build."""

    exit_code = 17


class PatchDoesNotApplyError(KvfixError):
    """A hunk finds no place, or more than one: the patch needs a person."""

    exit_code = 18


class NetworkError(KvfixError):
    """The index cannot be reached and the cache does not have the file: connect once."""

    exit_code = 19


class StorageError(KvfixError):
    """A folder cannot be written or is full: free space or name another folder."""

    exit_code = 20


class DirtyTreeError(KvfixError):
    """The checkout has uncommitted changes, or the branch exists: commit, stash or delete."""

    exit_code = 21


class GitError(KvfixError):
    """Git refused a command: its own words are in the message."""

    exit_code = 22


class RegistryError(KvfixError):
    """A file below `patches/` contradicts itself: correct the place that is named."""

    exit_code = 23


class CommandError(KvfixError):
    """A program that the tools started has failed: its own words are in the message."""

    exit_code = 24


class CheckFailedError(KvfixError):
    """A check ran to its end and found faults, all of them listed above the message."""

    exit_code = 30


class NeedsPersonError(KvfixError):
    """A fix cannot be carried by text alone: resolve it in the worktree that is named."""

    exit_code = 31

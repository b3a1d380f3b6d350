"""What is wrong with the tests themselves: never a word about the release under test.

A helper that cannot start a process, reach a server or build what a test needs raises
`HarnessError`. What the release does it hands back: a value, None, or a typed exception that the
test looks at; it asserts nothing on a test's behalf. See `tests.support.raised`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import TracebackType

RELEASE = ("vllm", "vllm_overlay")
"""The packages under test."""


class HarnessError(RuntimeError):
    """The tests could not be run as they were meant; fails a session on stock and on patched."""

    def __init__(self, found: str, expected: str) -> None:
        super().__init__(f"{found}; expected {expected}")


@contextlib.contextmanager
def building(what: str) -> Iterator[None]:
    """Also a decorator: `what` is built in here, of parts of the release.

    Raises:
        HarnessError: It cannot be.
    """
    try:
        yield
    except HarnessError:
        raise
    except Exception as error:
        message = f"{what} cannot be built: {error!r}"
        raise HarnessError(message, "a release that builds it as the helper says") from error


def frames(error: BaseException) -> Iterator[tuple[str, str]]:
    """Yield the file and the top-level package of each frame that `error` came through.

    The outermost is the first.
    """
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        name = str(trace.tb_frame.f_globals.get("__name__", ""))
        yield trace.tb_frame.f_code.co_filename, name.partition(".")[0]
        trace = trace.tb_next


def is_of_release(error: BaseException) -> bool:
    """Whether `error` came out of the release's code, which raised it or let it through."""
    return any(package in RELEASE for _, package in frames(error))

"""A pytest plugin: notes in each report of a failure who raised it (``-p tests.support.raised``).

`row["raised"]` in the log of pytest-reportlog is one of

- "test": an assertion of the test's own file. `AssertionError`, or pytest's `Failed`, where the
  innermost frame that is ours or the release's is in that file; what lies deeper is a library's
  way to assert. This alone is evidence of behaviour.
- "release": anything else that came out of the release's code (`vllm`, `vllm_overlay`) under a call
  of the test, or that a helper raised *from* such an exception. It is how the release fails, and
  no evidence of the defect that the test is about.
- "harness": the rest. A `HarnessError`, or what was raised while one was handled; whatever else a
  helper raised by itself, its assertions too; an error of the test's own code; a time limit; and
  all that goes wrong in collection, set-up and tear-down. It says nothing of the release.

`scripts.prove.outcomes` reads it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path
from typing import Literal

import pytest

from tests.support.harness import RELEASE, HarnessError, frames, is_of_release

Raised = Literal["test", "release", "harness"]

_ASSERTING = (AssertionError, pytest.fail.Exception)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note who raised what a test failed with."""
    report = yield
    if report.failed and call.excinfo is not None:
        tests = (item.config.rootpath / "tests").resolve()
        said = who_raised(call.excinfo.value, item.path, tests)
        vars(report)["raised"] = said if call.when == "call" else "harness"
    return report


def who_raised(error: BaseException, own: Path, tests: Path) -> Raised:
    """Return who raised `error` in a test of the file `own`; helpers lie below `tests`."""
    if any(isinstance(one, HarnessError) for one in _behind(error)):
        return "harness"
    ours: list[str] = []
    for file, package in frames(error):
        if package == "pytest_timeout":
            return "harness"
        if package in RELEASE:
            ours.append("release")
        elif Path(file) == own:
            ours.append("test")
        elif _resolved(file).is_relative_to(tests):
            ours.append("helper")
    if isinstance(error, _ASSERTING) and ours[-1:] == ["test"]:
        return "test"
    cause = error.__cause__
    if is_of_release(error) or (cause is not None and is_of_release(cause)):
        return "release"
    return "harness"


@cache
def _resolved(file: str) -> Path:
    return Path(file).resolve()


def _behind(error: BaseException) -> Iterator[BaseException]:
    """Yield `error`, and what it was raised from or while handling."""
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        one = pending.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            yield one
            pending += [one.__cause__, one.__context__]

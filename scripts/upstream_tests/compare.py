"""Upstream's tests on the stock and on the patched wheel: what changed between the two, by test id.

A difference counts only after it was seen again: each test that differs runs three more times
alone and once more with its whole file, on both sides (`settle`). A newly failing test is a fault
unless the registry names it (`[[fix.upstream-test]]`), and so is a named one that does not fail.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum

from packaging.specifiers import SpecifierSet

from scripts.patchset.registry import Fix
from scripts.prove.outcomes import Outcome, Outcomes, is_of


class Change(Enum):
    """What became of one test between stock and patched."""

    STILL_PASSING = "still passing"
    NEWLY_FAILING = "newly failing"
    NEWLY_PASSING = "newly passing"
    FAILING_IN_BOTH = "failing in both"
    SKIPPED_IN_BOTH = "skipped in both"
    APPEARED = "appeared"  # does not exist, or is skipped, on stock
    VANISHED = "vanished"  # does not exist, or is skipped, on patched
    FLAKY = "flaky"  # differed, and then did not, or varies on stock


_REASONS = (  # the first that matches
    ("hang", r"Timeout \(>|no sign of life"),
    ("crash of the interpreter", r"the interpreter (died|ended)"),
    ("package that is not installed", r"No module named|ModuleNotFoundError|PackageNotFound"),
    ("GPU driver", r"libcuda|nvidia|cuda|nvml|gpu|triton|driver|flash_?attn"),
    ("hub model", r"hugging ?face|LocalEntryNotFound|offline mode|couldn't connect|snapshot folder"
     r"|not a local folder|cached files|hf_hub|safetensors|model weights"),
    ("real engine", r"Engine core|EngineCore|EngineDead|Server (exited|failed)|WorkerProc"),
    ("RDMA or transfer library", r"nixl|ucx|mooncake|rdma|ibv_|lmcache|flexkv|hf3fs|mori"),
    ("network", r"ConnectionError|Name or service not known|getaddrinfo|Max retries"),
    ("kernel that the CPU lacks", r"not implemented for 'CPU'|CPU backend|'_C' object|torch\.ops"
     r"|Float8"),
    ("assertion of the test", r"assert|Failed: "),
)  # fmt: skip
_ADDRESS = re.compile(r"0x[0-9a-f]{6,}")
_PATH = re.compile(r"(/[\w.+-]+){2,}/")


def reason(outcome: Outcome) -> str:
    """Return the class of reasons to which a failure belongs, judged by what it says."""
    for name, pattern in _REASONS:
        if re.search(pattern, outcome.message, re.IGNORECASE):
            return name
    return "other"


def said(outcome: Outcome) -> str:
    """Return what a failure says, on one line, without what differs from machine to machine."""
    lines = [line for line in outcome.message.strip().splitlines() if line.strip()]
    line = lines[-1] if outcome.result == "error" and lines else "".join(lines[:1])
    return _PATH.sub("…/", _ADDRESS.sub("0x…", line))[:200]


def compare(stock: Outcomes, patched: Outcomes) -> dict[str, Change]:
    """Return what became of each test that either side has."""
    return {
        test: _change(stock.get(test), patched.get(test))
        for test in sorted(stock.keys() | patched.keys())
    }


def _change(stock: Outcome | None, patched: Outcome | None) -> Change:
    match _state(stock), _state(patched):
        case "passes", "passes":
            return Change.STILL_PASSING
        case "fails", "passes":
            return Change.NEWLY_PASSING
        case "fails", "fails":
            return Change.FAILING_IN_BOTH
        case _, "fails":
            return Change.NEWLY_FAILING
        case "does not run", "passes":
            return Change.APPEARED
        case "passes" | "fails", "does not run":
            return Change.VANISHED
        case _:
            return Change.SKIPPED_IN_BOTH


def _state(outcome: Outcome | None) -> str:
    if outcome is None or outcome.result == "skipped":
        return "does not run"
    return "passes" if outcome.result == "passed" else "fails"


def settle(
    first: Change,
    stock: Sequence[Outcomes],
    patched: Sequence[Outcomes],
    test: str,
) -> Change:
    """Return what to call a test that differed at first, after it has run again on both sides.

    Args:
        first: What the first run made of it: newly failing or newly passing.
        stock: What stock said later on, each time.
        patched: What patched said later on, each time.
        test: Its id.
    """
    later_stock = {_state(run.get(test)) for run in stock}
    later_patched = {_state(run.get(test)) for run in patched}
    if first is Change.NEWLY_FAILING:
        # Once more is enough: a test that stock always passes and the patched wheel sometimes
        # fails is broken, not flaky.
        steady = later_stock <= {"passes", "does not run"}
        return first if steady and "fails" in later_patched else Change.FLAKY
    steady = later_stock == {"fails"} and later_patched == {"passes"}
    return first if steady else Change.FLAKY


def named(fixes: Iterable[Fix], release: str, ids: Collection[str]) -> dict[str, str]:
    """Return the tests of `release` that rightly fails with one of the fixes `ids`, and why.

    Args:
        fixes: The registry's.
        release: The release whose tests they are.
        ids: The fixes that the patched wheel carries.
    """
    return {
        one.test: f"{fix.id}: {one.reason}"
        for fix in fixes
        if fix.id in ids
        for one in fix.upstream_tests
        if SpecifierSet(one.releases).contains(release)
    }


def is_named(test: str, names: Collection[str]) -> bool:
    """Whether the registry names this test, or the function whose parameters it has."""
    return any(is_of(test, name) for name in names)


def unproven(files: Iterable[str], stock: Outcomes) -> Iterator[str]:
    """Yield the recommended files that say nothing: none of their tests passes on stock.

    Where an environment lacks what they need, they fail on both sides, which is no difference.
    """
    for file in files:
        own = [outcome for test, outcome in stock.items() if is_of(test, file)]
        if not any(outcome.result == "passed" for outcome in own):
            why = f": {said(own[0])}" if own else ""
            yield f"no test of {file} passes on stock{why}"


def faults(changes: Mapping[str, Change], names: Collection[str], *, whole: bool) -> Iterator[str]:
    """Yield what must not be.

    Args:
        changes: What became of each test.
        names: The tests that the registry names.
        whole: Whether every named test was to run.
    """
    for test, change in changes.items():
        if change is Change.NEWLY_FAILING and not is_named(test, names):
            yield f"{test} passes on stock and fails on patched"
        elif change is Change.VANISHED:
            yield f"{test} runs on stock and does not run on patched"
    for name in names:
        own = {test: change for test, change in changes.items() if is_of(test, name)}
        if not own and whole:
            yield f"{name} is named in fixes.toml and did not run"
        if own and Change.NEWLY_FAILING not in own.values():
            yield f"{name} is named in fixes.toml as failing, and does not fail because of a fix"

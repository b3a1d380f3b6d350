"""What a scenario is: something done on one build of vLLM, and what could be seen of it.

A scenario is a function. It does something on which stock is right, and returns what a client, a
peer or an operator could see of it, as plain data: strings, numbers, lists, dicts. It asserts
nothing and knows no side: `nox -s parity` runs it on the stock and on the patched build of a
release and compares what came back, to the last value. Random ids, clocks and the version's name
have to be taken out (`scrubbed`).

    @scenario()
    async def a_good_request_is_served() -> Observed:
        async with serving() as server:
            return seen(await server.post(COMPLETIONS, body(COMPLETIONS)), server.core)

Where patched may have more than stock, and never less, that part is wrapped in `at_least`.
Where stock has the defect of a fix, there is nothing to compare with: the scenario names the fix
in `shows`, and is left out, with that reason, on the releases that have the defect.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

import vllm
from packaging.specifiers import SpecifierSet
from packaging.version import Version

Observed = Any
"""What can be written as JSON."""

Run = Callable[[], Observed | Awaitable[Observed]]


class LeftOutError(Exception):
    """This scenario cannot be run on the release; the message says why, for the report.

    Raise it for what the release or the environment lacks. Both builds of it lack the same, so a
    scenario that one side alone leaves out is a difference.
    """


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A scenario and what is known of it beforehand.

    Attributes:
        name: module, function and variant, as in `endpoints.answers[MultiConnector]`.
        run: does it; may be a coroutine function.
        shows: id of a fix -> why stock is not right here wherever it has that fix's defect;
            with a specifier after the id (``40364 <0.22``) only on those of the releases.
        exchanges: it writes what the other build has to read, see `exchange`.
    """

    name: str
    run: Run
    shows: Mapping[str, str]
    exchanges: bool = False


def shown_on(scenario: Scenario, release: str, affected: Collection[str]) -> str:
    """Why `release`, which has the defects of `affected`, is not right; empty where it is."""
    for key, reason in scenario.shows.items():
        fix, _, releases = key.partition(" ")
        if fix in affected and SpecifierSet(releases).contains(Version(release).base_version):
            return f"{fix}: {reason}"
    return ""


SCENARIOS: dict[str, Scenario] = {}
"""Every scenario whose module was imported, by name."""


def scenario(
    *of: str, shows: Mapping[str, str] | None = None, exchanges: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function a scenario; with `of`, one for each of these, which it then takes.

    Raises:
        ValueError: there is one of that name.
    """

    def decorate(run: Callable[..., Any]) -> Callable[..., Any]:
        name = f"{run.__module__.rpartition('.')[2]}.{run.__name__}"
        for one in of:
            _add(f"{name}[{one}]", functools.partial(run, one))
        if not of:
            _add(name, run)
        return run

    def _add(name: str, run: Run) -> None:
        if name in SCENARIOS:
            raise ValueError(f"two scenarios are called {name}")
        SCENARIOS[name] = Scenario(name, run, dict(shows or {}), exchanges)

    return decorate


def at_least(things: Collection[str]) -> Observed:
    """Things that patched must have wherever stock has them; it may have others besides."""
    return {"at least": sorted(things)}


_RANDOM = (
    (re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"), "UUID"),
    (re.compile(r"(?<![0-9a-f])[0-9a-f]{16,64}(?![0-9a-f])"), "HEX"),
    (re.compile(r'"(created|created_at|completed_at)": ?[0-9.]+'), r'"\1":TIME'),
    (re.compile(r"(?<=call_)[A-Za-z0-9]{20,}"), "ID"),
    (re.compile(r'"system_fingerprint": ?"[^"]*"'), '"system_fingerprint":"VERSION"'),
    (re.compile(r"0x[0-9a-f]{8,}"), "ADDRESS"),
    # Where an error was raised: the file stays, the folder and the line do not.
    (re.compile(r"/[\w./-]+?(?=/(vllm|site-packages)/)"), ""),
    (re.compile(r"(?<=\.py\\\", )line [0-9]+"), "LINE"),
    (re.compile(r"/tmp/[\w./-]+"), "FOLDER"),
)


def scrubbed(text: str | bytes) -> str:
    """`text` without what differs from run to run, or by the build's own name."""
    text = text.decode("utf-8", "backslashreplace") if isinstance(text, bytes) else text
    for pattern, replacement in _RANDOM:
        text = pattern.sub(replacement, text)
    return text.replace(vllm.__version__, "VERSION")


def said(error: BaseException) -> str:
    """An exception as an observation: what kind, and what it says first."""
    lines = str(error).splitlines() or [""]
    return scrubbed(f"{type(error).__name__}: {lines[0]}")

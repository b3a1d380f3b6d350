"""`nox -s simulate -- [RELEASE...] [--side SIDE]`: P and D as wholes, on a clock that we turn.

Plays random histories of prefill and decode engines: the release's own scheduler, NIXL connector
scheduler and workers, over a stand-in for NIXL with memory, and one for the model that writes into
the cache what identifies a prompt. Clients come and leave, reads are slow or fail, notifications
are late, engines restart. docs/simulation.md says what is checked after every step, what has been
found, and what is not simulated.

What is found is shrunk and printed as a timeline, and drawn as one (reports/*.svg). What a patched
build shows and stock does not, in the same history, is a fault; what both show is open, and named.

With `--requests N` the same engines serve N requests, with failures of every kind, and every table
that grows meanwhile is named. A table of a patched build of which nobody knows why is a fault.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from scripts.project import project, supported_release
from scripts.prove.simulation import PROFILES, SIDES, Life, Side, drawn, live, simulate, why
from scripts.system.console import at_least, entry, err, out, parser_of
from scripts.system.errors import CheckFailedError


def main() -> None:
    """Play histories on the releases that the command line names, or on the default one."""
    parser = parser_of("simulate", __doc__)
    parser.add_argument("release", nargs="*", default=[project().default_release])
    parser.add_argument("--side", choices=SIDES, help="stock or patched alone, not both")
    parser.add_argument("--steps", type=at_least(1), default=20_000, help="events on each side")
    parser.add_argument("--seed", default="0", help="other histories for another one")
    parser.add_argument(
        "--profile",
        choices=PROFILES,
        action="append",
        default=[],
        help="what may happen; all profiles in turn",
    )
    parser.add_argument(
        "--history", type=_history, help="this one only, by the seed that was printed"
    )
    parser.add_argument(
        "--first", type=_pattern, help="end a side when it shows something like this (regex)"
    )
    parser.add_argument("--timelines", action="store_true", help="print those of stock as well")
    parser.add_argument(
        "--requests", type=at_least(1), help="one life of engines, with so many requests"
    )
    parser.add_argument(
        "--without", action="append", default=[], help="with --requests: events that do not happen"
    )
    options = parser.parse_args()
    releases = [supported_release(release) for release in options.release]
    asked = [options.side] if options.side else SIDES
    if options.requests:
        words = ["--requests", str(options.requests), "--seed", options.seed]
        for event in options.without:
            words += ["--without", event]
        _live(releases, asked, words)
        return
    words = ["--steps", str(options.steps), "--seed", options.seed]
    for profile in options.profile:
        words += ["--profile", profile]
    if options.history:
        words += ["--history", options.history]
    if options.first:
        words += ["--first", options.first]
    faults: list[str] = []
    for release in releases:
        for side in simulate(release, asked, words):
            out.print(_table(release, side))
            pictures = drawn(release, side)
            for label, row in side.findings.items():
                err.print(f"drawn in {pictures[label]}: {label}", markup=False, soft_wrap=True)
                if options.timelines or label in side.own:
                    err.print(f"\n{release}, {side.name}: {label}", markup=False)
                    err.print(f"{row['setting']}\n{row['timeline']}", markup=False, soft_wrap=True)
            faults += [f"{release}: {label}" for label in side.own]
    if faults:
        raise CheckFailedError(
            f"a patched build does what stock does not: {'; '.join(faults)}",
            expected="nothing that the same history does not show on stock",
            next_step="read the timelines above; reports/ has the shrunk histories",
        )


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from error
    return text


def _history(text: str) -> str:
    if text.partition("/")[0] not in PROFILES:
        raise argparse.ArgumentTypeError(
            f"{text!r} is of no profile; a seed is printed as in {PROFILES[0]}/0/1"
        )
    return text


def _live(releases: Sequence[str], sides: Sequence[str], words: Sequence[str]) -> None:
    """Let engines serve requests, and print what grows."""
    faults = []
    for release in releases:
        for life in live(release, sides, words):
            out.print(_grown(release, life))
            counts = {"events": life.events, "ends": life.ends, "found": life.found}
            for what, counted in counts.items():
                said = ", ".join(f"{number} {name}" for name, number in counted.items())
                out.print(f"{what}: {said or 'none'}", markup=False)
            if life.name == "patched":
                faults += [f"{release}: {table} grows" for table in life.unexplained]
                faults += [f"{release}: {label}" for label in life.found]
    if faults:
        raise CheckFailedError(
            f"a patched build does not end as it began: {'; '.join(faults)}",
            expected="no table that grows, but those of `GROWS` in scripts/prove/simulation.py",
            next_step="reports/ has the sizes; leave events out with --without until it is flat",
        )


def _grown(release: str, life: Life) -> Table:
    first, last = life.memory
    title = (
        f"{release}, {life.name}: {life.requests} requests, {life.steps} steps, "
        f"{life.seconds:.0f} s; memory blocks of Python from {first} to {last}"
    )
    table = Table("what grows", "most in the 1st quarter", "least in the last", "why", title=title)
    for name, (most, least) in life.growing.items():
        table.add_row(*map(escape, (name, str(most), str(least), why(name) or "nobody knows")))
    return table


def _table(release: str, side: Side) -> Table:
    speed = side.steps / side.seconds if side.seconds else 0
    title = (
        f"{release}, {side.name}: {side.steps} steps in {side.histories} histories, "
        f"{side.seconds:.0f} s ({speed:.0f}/s)"
    )
    table = Table("found", "times", "after steps", "history", "shrunk to", "stock", title=title)
    for label, row in side.findings.items():
        there = "" if label not in side.elsewhere else "the same"
        if label in side.own:
            there = side.elsewhere[label] or "nothing"
        values = (side.times[label], row["steps"], row["seed"], f"{len(row['shrunk'])} events")
        table.add_row(*map(escape, (label, *map(str, values), there)))
    return table


if __name__ == "__main__":
    entry(main)

"""What became of the fixes, as tables for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Column, Table

from scripts.carry.merge import Carried, How
from scripts.carry.state import Result


def table(release: str, results: Sequence[Result]) -> Table:
    """Return what became of each fix, for people."""
    made = Table("fix", "from", "result", "proof", _folded("hints"), title=f"vLLM {release}")
    for result in results:
        hints = escape("\n".join(result.hints))
        made.add_row(result.fix, result.source, result.status.value, result.proof.value, hints)
    return made


def collisions(result: Result, one: Carried, release: str) -> Table:
    """Return which hunks need a person, what they meet, and where their target may have gone."""
    made = Table(
        *map(_folded, ("file", "in", "hunk", "result", f"vLLM {release} has")),
        title=f"fix {result.fix}",
        show_lines=True,
    )
    for hunk in one.hunks:
        if hunk.how in (How.EXACT, How.MOVED):
            continue
        said = escape("\n".join([hunk.said, *(f"perhaps {place}" for place in hunk.went)]))
        made.add_row(hunk.path, hunk.definition, str(hunk.number), hunk.how.value, said)
    return made


def _folded(name: str) -> Column:
    return Column(name, overflow="fold")  # a path that is cut cannot be opened

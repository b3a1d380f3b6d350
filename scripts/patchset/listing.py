"""Which fixes are in what a command has written, for people."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from scripts.patchset.patch import Offset, Patch
from scripts.patchset.registry import Registry
from scripts.system.console import out


def list_fixes(patches: Sequence[Patch], registry: Registry, offsets: Sequence[Offset]) -> None:
    """Say which fixes are in what was written, and which of their hunks have moved."""
    for one in patches:
        out.print(f"  {one.fix_id:>6}  {registry.fix(one.fix_id).title}", markup=False)
    for (patch, path), moved in groupby(offsets, lambda offset: (offset.patch, offset.path)):
        numbers, lines = zip(*((str(one.hunk), f"{one.lines:+d}") for one in moved), strict=True)
        hunks = f"hunk{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"
        out.print(
            f"  {patch}: {hunks} of {path} applied {', '.join(lines)} lines away", markup=False
        )

"""Which fixes are in what a command has written, for people."""

from __future__ import annotations

from collections.abc import Sequence

from scripts.patchset.patch import Offset, Patch
from scripts.patchset.registry import Registry
from scripts.system.console import out


def list_fixes(patches: Sequence[Patch], registry: Registry, offsets: Sequence[Offset]) -> None:
    """Say which fixes are in what was written, and which of their hunks have moved."""
    for patch in patches:
        out.print(f"  {patch.fix_id:>6}  {registry.fix(patch.fix_id).title}", markup=False)
    for offset in offsets:
        out.print(
            f"  {offset.patch}: hunk {offset.hunk} of {offset.path} "
            f"applied {offset.lines:+d} lines away",
            markup=False,
        )

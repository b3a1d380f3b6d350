"""The releases that fixes are carried from, and which of them each fix comes from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from scripts.carry.merge import Carried, Source, carry
from scripts.patchset.registry import Fix, Registry
from scripts.patchset.series import Series
from scripts.system.git import Repository


class Sides:
    """One or two series, the preferred one first.

    A fix comes from the first unless it has no patch there, or would need a person: then it comes
    from the other if it is carried from there without one.
    """

    def __init__(self, sources: Sequence[Series], read: Callable[[str, str], str]) -> None:
        """Start from the stock releases, whose files `read` gives by release and path."""
        self._sides = [
            (
                series.release,
                {patch.fix_id: patch for patch in series.patches},
                Source(partial(read, series.release)),
            )
            for series in sources
        ]

    def fixes(self, registry: Registry) -> list[Fix]:
        """Return the fixes that have a patch on one side at least, in the registry's order."""
        ids = {fix_id for _, patches, _ in self._sides for fix_id in patches}
        return [fix for fix in registry.fixes.values() if fix.id in ids]

    def carry(
        self,
        fix: Fix,
        ours: Callable[[str], str | None],
        repository: Repository,
        revision: str,
        *,
        looking: bool = True,
    ) -> tuple[str, Carried]:
        """Carry a fix; return the release that it comes from, and what came out.

        Where all would need a person, the first that has the fix counts.

        Args:
            fix: One of `fixes`.
            ours: Text, by path, of the other release and what was carried to it; None: no file.
            repository: Where the other release is, and where merges are made.
            revision: The other release there.
            looking: Whether to look where targets that are gone may have gone, for a person.
        """
        tried: list[tuple[str, Carried]] = []
        for release, patches, source in self._sides:
            if patch := patches.get(fix.id):
                before = source.before(patch)
                one = carry(patch, before, ours, repository, revision, looking=looking)
                if not one.status.stops:
                    return release, one
                tried.append((release, one))
        return tried[0]

    def add(self, fix: Fix, *, carried: bool) -> None:
        """Go on behind a fix, which was carried to the other release, from whichever, or not."""
        for _, patches, source in self._sides:
            if patch := patches.get(fix.id):
                source.add(patch, carried=carried)

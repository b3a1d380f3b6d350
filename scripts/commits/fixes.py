"""Patches as commits that hold all they need: hooks, notices, overlay files and provenance.

Unlike the patches of `patches/`, which are hooks alone, such a commit works in any clone of vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from scripts.patchset.overlay import overlay_files, provenance, stamp
from scripts.patchset.patch import Offset, Patch, apply_patches
from scripts.patchset.registry import Registry
from scripts.system.errors import TouchedFileDiffersError
from scripts.system.git import Repository


def branch_name(release: str, fix_id: str = "") -> str:
    """Return the name of the branch with all fixes for `release`, or with one and its needs."""
    return f"kvfix/v{release}" + (f"-{fix_id}" if fix_id else "")


def commit_fixes(
    repository: Repository, base: str, registry: Registry, branches: Sequence[Sequence[Patch]]
) -> tuple[list[list[str]], list[Offset]]:
    """Commit fixes on top of one revision, one commit each; what branches share is made once.

    Each commit holds the hooks of one fix, the overlay files that it is the first to need, and its
    provenance. Their date is that of the revision, so the same input gives the same ids.

    Args:
        repository: Where they are made; no branch and no checkout of it is touched.
        base: The revision.
        registry: What their messages come from.
        branches: The patches of each branch.

    Returns:
        The commits of each branch, and the hunks that were found at other lines.

    Raises:
        TouchedFileDiffersError: The revision lacks a file that a patch changes.
        PatchDoesNotApplyError: A hunk has no place, or several.
    """
    date = repository.run("show", "-s", "--format=%cI", base).strip()
    with repository.committing(registry.author, date) as store:
        fixes = _Fixes(repository, base, registry, store)
        return [fixes.commit(patches) for patches in branches], fixes.offsets


class _Fixes:
    def __init__(
        self, repository: Repository, base: str, registry: Registry, store: Callable[..., str]
    ) -> None:
        self._repository, self._base, self._registry = repository, base, registry
        self._store = store
        self._stock: dict[str, str] = {}
        self._made: dict[tuple[str, ...], str] = {}  # by the fixes up to this one
        self._overlay: dict[str, dict[str, bytes]] = {}  # what each fix needs
        self.offsets: list[Offset] = []

    def commit(self, patches: Sequence[Patch]) -> list[str]:
        commits: list[str] = []
        carried: set[str] = set()
        stamped: dict[str, list[str]] = {}
        # Without the notices, which would move the hunks of later patches.
        texts: dict[str, str] = {}
        for number, patch in enumerate(patches, start=1):
            before = {path: texts.get(path) or self._read(path) for path in patch.files}
            after, moved = apply_patches([patch], before.__getitem__)
            texts |= after
            self.offsets += moved
            files: dict[str, bytes] = {}
            for path, text in after.items():
                stamped.setdefault(path, []).append(patch.fix_id)
                files[path] = stamp(text, stamped[path]).encode()
            if patch.fix_id not in self._overlay:
                self._overlay[patch.fix_id] = overlay_files([patch])
            overlay = self._overlay[patch.fix_id]
            files.update((name, data) for name, data in overlay.items() if name not in carried)
            carried |= overlay.keys()
            fix = self._registry.fix(patch.fix_id)
            files.update([provenance(fix)])
            key = tuple(one.fix_id for one in patches[:number])
            if key not in self._made:
                parent = commits[-1] if commits else self._base
                self._made[key] = self._store(parent, files, self._registry.message(fix))
            commits.append(self._made[key])
        return commits

    def _read(self, path: str) -> str:
        if path not in self._stock:
            text = self._repository.read(self._base, path)
            if text is None:
                raise TouchedFileDiffersError(
                    f"{self._repository.path} has no {path}",
                    expected="every file that the series changes",
                    next_step="name the release that the checkout is based on",
                )
            self._stock[path] = text
        return self._stock[path]

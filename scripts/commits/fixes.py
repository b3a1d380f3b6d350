"""Patches as commits that hold all they need: hooks, notices, overlay files and provenance.

Unlike the patches of `patches/`, which are hooks alone, such a commit works in any clone of vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence

from scripts.patchset.overlay import overlay_files, provenance, stamp
from scripts.patchset.patch import Offset, Patch, apply_patches
from scripts.patchset.registry import Registry
from scripts.system.errors import TouchedFileDiffersError
from scripts.system.git import Repository


def branch_name(release: str, fix_id: str = "") -> str:
    """Return the name of the branch with all fixes for `release`, or with one and its needs."""
    return f"kvfix/v{release}" + (f"-{fix_id}" if fix_id else "")


def commit_fixes(
    repository: Repository, base: str, patches: Sequence[Patch], registry: Registry
) -> tuple[list[str], list[Offset]]:
    """Commit `patches` on top of `base`, one commit each; touch no branch and no checkout.

    Each commit holds the hooks of one fix, the overlay files that it is the first to need, and
    its provenance. Its date is that of `base`, so the same input gives the same ids.

    Returns:
        The commits, and the hunks that were found at other lines.

    Raises:
        TouchedFileDiffersError: `base` lacks a file that a patch changes.
        PatchDoesNotApplyError: A hunk has no place, or several.
    """
    date = repository.run("show", "-s", "--format=%cI", base).strip()
    commits: list[str] = []
    offsets: list[Offset] = []
    carried: set[str] = set()
    stamped: dict[str, list[str]] = {}
    texts: dict[str, str] = {}  # without the notices, which would move the hunks of later patches
    for number, patch in enumerate(patches, start=1):
        before = {path: texts.get(path) or _read(repository, base, path) for path in patch.files}
        after, moved = apply_patches([patch], before.__getitem__)
        texts |= after
        offsets += moved
        files: dict[str, bytes] = {}
        for path, text in after.items():
            stamped.setdefault(path, []).append(patch.fix_id)
            files[path] = stamp(text, stamped[path]).encode()
        overlay = overlay_files(patches[:number])
        files.update((name, data) for name, data in overlay.items() if name not in carried)
        carried |= overlay.keys()
        fix = registry.fix(patch.fix_id)
        files.update([provenance(fix)])
        parent = commits[-1] if commits else base
        message = registry.message(fix)
        commits.append(repository.commit(parent, files, message, author=registry.author, date=date))
    return commits, offsets


def _read(repository: Repository, revision: str, path: str) -> str:
    text = repository.read(revision, path)
    if text is None:
        raise TouchedFileDiffersError(
            f"{repository.path} has no {path}",
            expected="every file that the series changes",
            next_step="name the release that the checkout is based on",
        )
    return text

"""Fixes as a branch in a clone of vLLM or of a fork: `apply --tree DIR`, `export --into DIR`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from packaging.version import Version

from scripts.commits.fixes import commit_fixes
from scripts.patchset.overlay import PACKAGE
from scripts.patchset.patch import Offset, Patch
from scripts.patchset.registry import Registry
from scripts.project import project
from scripts.system.errors import AlreadyPatchedError, DirtyTreeError, UsageError, WrongReleaseError
from scripts.system.git import Repository

_UPSTREAM = "https://github.com/vllm-project/vllm"


def apply_to_tree(
    folder: Path, branch: str, release: str, patches: Sequence[Patch], registry: Registry
) -> list[Offset]:
    """Create `branch` on top of HEAD of the checkout in `folder`, one commit for each patch.

    Commits are made beside the checkout and the branch appears last, in one step, so a kill at
    any moment leaves the repository as it was, or complete. The checkout itself is not switched.

    Returns:
        The hunks that were found at other lines.

    Raises:
        UsageError: `folder` is no git checkout of vLLM.
        DirtyTreeError: There are uncommitted changes, or the branch exists.
        WrongReleaseError: HEAD descends from another release's tag.
        AlreadyPatchedError: HEAD already holds the overlay.
        TouchedFileDiffersError: HEAD lacks a file that the series changes.
        PatchDoesNotApplyError: A hunk has no place, or several.
    """
    repository = Repository(folder)
    # A folder inside of a clone is none: git would look upwards, and find other paths.
    head = repository.resolve("HEAD") if (folder / ".git").exists() else None
    if head is None or not (folder / "vllm" / "__init__.py").is_file():
        raise UsageError(
            f"{folder} is no git checkout of vLLM",
            expected="the top folder of a clone, with vllm/ in it and at least one commit",
            next_step="clone vLLM or the fork there, then run the same command",
        )
    _check_state(repository, head, branch, release)
    (commits,), offsets = commit_fixes(repository, head, registry, [patches])
    repository.run("branch", branch, commits[-1])
    return offsets


def _check_state(repository: Repository, head: str, branch: str, release: str) -> None:
    folder, at = repository.path, f"git -C {quote(str(repository.path))}"
    if changes := repository.changes():
        raise DirtyTreeError(
            f"{folder} has {len(changes)} uncommitted changes, the first: {changes[0].strip()}",
            expected="a clean checkout",
            next_step=f"{at} stash --include-untracked",
        )
    if repository.resolve(f"refs/heads/{branch}"):
        raise DirtyTreeError(
            f"{folder} already has a branch {branch}",
            expected="no such branch",
            next_step=f"{at} branch -m {branch} {_free_name(repository, branch)}",
        )
    if repository.run("ls-tree", head, "--", PACKAGE):
        raise AlreadyPatchedError(
            f"{folder} already holds {PACKAGE}/",
            expected=f"a checkout of vLLM {release} without kvfix",
            next_step=f"{_fetch(repository, at, release)}{at} switch --detach v{release}",
        )
    reachable = repository.run("tag", "--list", "v[0-9]*", "--merged", head).split()
    known = repository.run("tag", "--list", f"v{release}").split()
    # A fork has tags of its own, so only the names of releases that we know count.
    bases = [name for name in project().releases if f"v{name}" in reachable]
    base = max(bases, key=Version, default=None)
    if base != release and (base or known):
        raise WrongReleaseError(
            f"HEAD of {folder} "
            + (f"is on top of v{base}" if base else f"does not descend from v{release}"),
            expected=f"a checkout of v{release}, or a fork on top of it",
            next_step=f"{_fetch(repository, at, release)}{at} switch --detach v{release}",
        )


def _free_name(repository: Repository, branch: str) -> str:
    names = (f"{branch}-old{number}" for number in ("", *range(2, 1000)))
    return next(name for name in names if not repository.resolve(f"refs/heads/{name}"))


def _fetch(repository: Repository, at: str, release: str) -> str:
    """Return the command that gets the release's tag; empty where the clone has it."""
    if repository.resolve(f"refs/tags/v{release}"):
        return ""
    return f"{at} fetch --no-tags {_UPSTREAM} tag v{release}; "

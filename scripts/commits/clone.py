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
from scripts.system.console import err
from scripts.system.errors import AlreadyPatchedError, DirtyTreeError, UsageError, WrongReleaseError
from scripts.system.git import Repository
from scripts.upstream.tree import read_source

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
    if not _check_state(repository, head, branch, release):
        _say_what_differs(repository, head, release, patches)
    (commits,), offsets = commit_fixes(repository, head, registry, [patches])
    repository.run("branch", branch, commits[-1])
    return offsets


def _say_what_differs(
    repository: Repository, head: str, release: str, patches: Sequence[Patch]
) -> None:
    """Without tags nothing tells a fork of the release from another release."""
    names = sorted({name for patch in patches for name in patch.files})
    others = [n for n in names if repository.read(head, n) != read_source(release, n)]
    if others:
        err.print(
            f"{repository.path} has no tag of a release, and other text than vLLM {release} in "
            f"{len(others)} of the {len(names)} files that are changed, such as {others[0]}: is it "
            "a fork of that release?",
            markup=False,
        )


def _check_state(repository: Repository, head: str, branch: str, release: str) -> bool:
    """Raise where the branch cannot be made; return whether tags say which release HEAD is of."""
    folder, at = repository.path, f"git -C {quote(str(repository.path))}"
    if changes := repository.changes():
        unmerged = any("U" in line[:2] or line[:2] in ("AA", "DD") for line in changes)
        raise DirtyTreeError(
            f"{folder} has {len(changes)} uncommitted changes, the first: {changes[0].strip()}",
            expected="a clean checkout",
            next_step="end the merge that is under way there, then run the same command"
            if unmerged
            else f"{at} stash --include-untracked",
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
    return base is not None


def _free_name(repository: Repository, branch: str) -> str:
    names = (f"{branch}-old{number}" for number in ("", *range(2, 1000)))
    return next(name for name in names if not repository.resolve(f"refs/heads/{name}"))


def _fetch(repository: Repository, at: str, release: str) -> str:
    """Return the command that gets the release's tag; empty where the clone has it."""
    if repository.resolve(f"refs/tags/v{release}"):
        return ""
    return f"{at} fetch --no-tags {_UPSTREAM} tag v{release}; "

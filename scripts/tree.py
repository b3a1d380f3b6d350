"""`apply --tree DIR`: the series on a git checkout of vLLM, one commit for each fix."""

from __future__ import annotations

from pathlib import Path

from packaging.version import Version

from scripts.errors import (
    AlreadyPatchedError,
    DirtyTreeError,
    TouchedFileDiffersError,
    UsageError,
    WrongReleaseError,
)
from scripts.fixes import Registry
from scripts.git import Repository
from scripts.overlay import PACKAGE, overlay_files, provenance, stamp
from scripts.patch import Offset, apply_patches
from scripts.project import project
from scripts.series import Series


def apply_to_tree(
    folder: Path, release: str, series: Series, registry: Registry
) -> tuple[str, list[Offset]]:
    """Create branch `kvfix/<release>` on top of HEAD of the checkout in `folder`.

    Commits are made beside the checkout and the branch appears last, in one step, so a kill at
    any moment leaves the repository as it was, or complete. The checkout itself is not switched.
    Each commit holds the hooks of one fix, the overlay files that it is the first to need, and
    its provenance.

    Returns:
        The name of the branch, and the hunks that were found at other lines.

    Raises:
        UsageError: `folder` is no git checkout of vLLM.
        DirtyTreeError: There are uncommitted changes, or the branch exists.
        WrongReleaseError: HEAD descends from another release's tag.
        AlreadyPatchedError: HEAD already holds the overlay.
        PatchDoesNotApplyError: A hunk has no place, or several.
    """
    repository = Repository(folder)
    # A folder inside of a clone is none: git would look upwards, and find other paths.
    head = repository.resolve("HEAD") if (folder / ".git").exists() else None
    if head is None or not (folder / "vllm" / "__init__.py").is_file():
        raise UsageError(
            f"{folder} is no git checkout of vLLM",
            expected="the top folder of a clone, with vllm/ in it and at least one commit",
            next_step=f"git clone the fork there, then: nox -s apply -- {release} --tree {folder}",
        )
    branch = f"kvfix/{release}"
    _check_state(repository, head, branch, release)
    date = repository.run("show", "-s", "--format=%cI", head).strip()
    carried: set[str] = set()
    offsets: list[Offset] = []
    stamped: dict[str, list[str]] = {}
    texts: dict[str, str] = {}  # without the notices, which would move the hunks of later patches
    stock = head
    for number, patch in enumerate(series.patches):
        before = {path: texts.get(path) or _read(repository, stock, path) for path in patch.files}
        after, moved = apply_patches([patch], before.__getitem__)
        texts |= after
        offsets += moved
        files: dict[str, bytes] = {}
        for path, text in after.items():
            stamped.setdefault(path, []).append(patch.fix_id)
            files[path] = stamp(text, stamped[path]).encode()
        overlay = overlay_files(series.patches[: number + 1])
        files.update((name, data) for name, data in overlay.items() if name not in carried)
        carried |= overlay.keys()
        fix = registry.fix(patch.fix_id)
        files.update([provenance(fix)])
        head = repository.commit(
            head, files, registry.message(fix), author=registry.author, date=date
        )
    repository.run("branch", branch, head)
    return branch, offsets


def _check_state(repository: Repository, head: str, branch: str, release: str) -> None:
    folder = repository.path
    if changes := repository.changes():
        raise DirtyTreeError(
            f"{folder} has {len(changes)} uncommitted changes, the first: {changes[0].strip()}",
            expected="a clean checkout",
            next_step=f"git -C {folder} stash --include-untracked",
        )
    if repository.resolve(f"refs/heads/{branch}"):
        raise DirtyTreeError(
            f"{folder} already has a branch {branch}",
            expected="no such branch",
            next_step=f"git -C {folder} branch -m {branch} {branch}-old",
        )
    if repository.run("ls-tree", head, "--", PACKAGE):
        raise AlreadyPatchedError(
            f"{folder} already holds {PACKAGE}/",
            expected=f"a checkout of vLLM {release} without kvfix",
            next_step=f"git -C {folder} switch --detach v{release}",
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
            next_step=f"git -C {folder} fetch --tags; git -C {folder} switch --detach v{release}",
        )


def _read(repository: Repository, revision: str, path: str) -> str:
    text = repository.read(revision, path)
    if text is None:
        raise TouchedFileDiffersError(
            f"{repository.path} has no {path}",
            expected="every file that the series changes",
            next_step="name the release that the checkout is based on",
        )
    return text

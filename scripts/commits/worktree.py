"""One fix in a worktree, and its patch written back from there."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Collection
from functools import partial
from pathlib import Path

from scripts.commits.patches import commit_hooks, release_repository
from scripts.commits.stored import Change, Differ, stored, write
from scripts.patchset.documents import documents
from scripts.patchset.patch import Patch, apply_patches, read_patch
from scripts.patchset.registry import Fix, Registry, load_registry
from scripts.patchset.series import carried_releases, first_serving, patch_files, patch_for, served
from scripts.patchset.target import Target
from scripts.project import ROOT, project
from scripts.system.console import out
from scripts.system.errors import PatchDoesNotApplyError, RegistryError, UsageError
from scripts.system.files import only_process, read_json, replace_text, working_folder
from scripts.system.git import Repository
from scripts.upstream.tree import read_source

WORKTREE = ROOT / ".work" / "edit"
_STATE = WORKTREE / ".git" / "kvfix.json"


def start(release: str, fix_id: str, *, alone: bool = False) -> None:
    """Lay out the worktree for fix `fix_id` on a release that is carried.

    Args:
        release: The release.
        fix_id: The fix.
        alone: Whether the other releases of the same patch file are to keep it as it is.

    Raises:
        UsageError: The release needs no such fix, or an edit is not finished.
        PatchDoesNotApplyError: A fix before it does not apply.
    """
    registry = load_registry()
    fix = _needed(registry, fix_id, release)
    WORKTREE.parent.mkdir(exist_ok=True)
    with only_process(WORKTREE.parent, "edits a fix in this checkout"):
        _start(fix, release, registry, alone=alone)
    where = WORKTREE.relative_to(ROOT)
    out.print(f"Edit {where}/vllm (git -C {where} diff HEAD), then: nox -s edit -- --continue")


def _start(fix: Fix, release: str, registry: Registry, *, alone: bool) -> None:
    if _STATE.is_file():
        raise UsageError(
            f"{WORKTREE.relative_to(ROOT)} holds an edit that is not finished",
            expected="no worktree",
            next_step="nox -s edit -- --continue, or: nox -s edit -- --abort",
        )
    with working_folder(WORKTREE) as work:
        repository = release_repository(release, work, registry)
        before = commit_hooks(repository, "HEAD", _before(fix, release, registry), registry)
        parent = before[-1] if before else f"v{release}"
        repository.run("reset", "--quiet", "--hard", _with(fix, release, repository, parent))
        # What is edited shows as an uncommitted change against everything that comes before it.
        repository.run("reset", "--quiet", "--soft", parent)
        state = {"release": release, "fix": fix.id, "alone": alone}
        (work / _STATE.relative_to(WORKTREE)).write_text(json.dumps(state), encoding="utf-8")
        # Without a state it is no edit, but what is left of one that a kill has ended.
        shutil.rmtree(WORKTREE, ignore_errors=True)
        work.rename(WORKTREE)


def an_edit() -> str:
    """Return a release and a fix that can be edited, as they are typed."""
    target = Target.of(project().default_release)
    return f"{target.release} {target.patches[0].fix_id}"


def _needed(registry: Registry, fix_id: str, release: str) -> Fix:
    if fix_id not in registry.fixes:
        raise UsageError(
            f"patches/fixes.toml has no fix {fix_id}",
            expected=f"one of {', '.join(registry.fixes)}",
            next_step="write its [[fix]] table first, as CONTRIBUTING.md says",
        )
    fix = registry.fixes[fix_id]
    if not fix.needed_on(release):
        why = fix.unpatched_on(release) or f"it applies to {fix.applies_to}"
        raise UsageError(
            f"patches/fixes.toml gives {release} no fix {fix_id}: {why}",
            expected="a release that has the defect and is to have the fix",
            next_step="correct its [[fix]] table, or name another release",
        )
    return fix


def _before(fix: Fix, release: str, registry: Registry) -> list[Patch]:
    """Return the patches that are applied to `release` before that of `fix`."""
    ids = list(registry.fixes)
    fixes = [registry.fixes[one] for one in ids[: ids.index(fix.id)]]
    return [read_patch(patch_for(one, release)) for one in fixes if one.needed_on(release)]


def _with(fix: Fix, release: str, repository: Repository, parent: str) -> str:
    """Return a commit with `fix` as it is now on top of `parent`; `parent` where it is not there.

    It may be new, or the file that serves the release may be one that does not apply to it yet.
    """
    registry, files = load_registry(), patch_files(fix)
    first = first_serving(files, release)
    if first is None:
        return parent
    try:
        return commit_hooks(repository, parent, [read_patch(files[first])], registry)[-1]
    except PatchDoesNotApplyError as error:
        out.print(f"Not in the worktree: {error.found}", markup=False)
        return parent


def restamp() -> None:
    """Make anew what follows from the registry and from what the patches do.

    That is the patch files (their heads, their line numbers, and which there are) and the
    documents.

    Raises:
        RegistryError: A release that is carried has no patch for a fix that it needs.
    """
    registry = load_registry()
    for release in carried_releases():
        for fix in registry.fixes.values():
            if fix.needed_on(release):
                patch_for(fix, release)
    write(stored(registry, carried_releases()), registry)
    for path, text in documents(registry).items():
        replace_text(path, text)


def forget() -> bool:
    """Remove the worktree: its state first, so that nobody goes on with a part of the rest.

    Returns:
        Whether there was one.
    """
    was = _STATE.is_file()
    _STATE.unlink(missing_ok=True)
    shutil.rmtree(WORKTREE, ignore_errors=True)
    return was


def finish() -> None:
    """Write the patch from what the worktree holds, and remove the worktree.

    Raises:
        UsageError: There is no edit, it changes nothing, or more than upstream's own files.
    """
    if not _STATE.is_file():
        raise UsageError(
            "there is no edit to continue",
            expected=f"a worktree in {WORKTREE.relative_to(ROOT)}",
            next_step=f"start one, for example: nox -s edit -- {an_edit()}",
        )
    where = WORKTREE.relative_to(ROOT)
    state = read_json(
        _STATE, next_step=f"keep what you need of {where}/vllm, then: nox -s edit -- --abort"
    )
    release, registry = state["release"], load_registry()
    fix = _needed(registry, state["fix"], release)
    repository = Repository(WORKTREE)
    changed = changed_files(repository)
    if not changed:
        raise UsageError(
            f"the worktree changes nothing, so fix {fix.id} would have an empty patch",
            expected="at least one changed file below vllm/",
            next_step=f"edit {WORKTREE.relative_to(ROOT)}/vllm, then: nox -s edit -- --continue; "
            "or give up: nox -s edit -- --abort",
        )
    before = {path: repository.read("HEAD", path) or "" for path in changed}
    after = {path: (WORKTREE / path).read_bytes().decode() for path in changed}
    with tempfile.TemporaryDirectory() as folder:
        patch = Differ(Path(folder)).patch(fix, release, before, after)
    together = _together(fix, release)
    change = Change(release, {fix.id: patch}, alone=state["alone"])
    names = write(stored(registry, carried_releases(), change), registry)
    forget()
    _say(fix, release, names, together, registry)


def _together(fix: Fix, release: str) -> list[str]:
    """Return the releases that have the same file as `release` has."""
    by_first = served(fix, patch_files(fix), carried_releases())
    return by_first.get(first_serving(by_first, release) or "", [])


def _say(
    fix: Fix,
    release: str,
    names: Collection[str],
    together: Collection[str],
    registry: Registry,
) -> None:
    served_now = _together(fix, release)
    now = [one for one in served_now if _applies(fix, one, registry)]
    out.print(f"Fix {fix.id} on {', '.join(now)}: {fix.name}/{now[0]}.patch", markup=False)
    there = {f"{fix.name}/{path.name}" for path in patch_files(fix).values()}
    for name in names:
        gone = name.startswith(f"{fix.name}/") and name not in there
        out.print(f"  {'removed' if gone else 'wrote'} patches/{name}", markup=False)
    left = [one for one in together if one not in served_now]
    without = [one for one in served_now if one not in now]
    if left:
        out.print(f"[bold]As it was on {', '.join(left)}[/], where the new patch does not apply")
    if without:
        out.print(f"[bold]Still none for {', '.join(without)}[/], where this one does not apply")
    if needing := [*left, *without]:
        out.print(f"Now, if they need it too: nox -s edit -- {needing[0]} {fix.id}")
    else:
        out.print("Now: nox -s lint")


def _applies(fix: Fix, release: str, registry: Registry) -> bool:
    """Whether the file that serves the release applies there; that of an earlier one may not."""
    patches = [*_before(fix, release, registry), read_patch(patch_for(fix, release))]
    try:
        apply_patches(patches, partial(read_source, release))
    except (PatchDoesNotApplyError, RegistryError):
        return False
    return True


def changed_files(repository: Repository) -> list[str]:
    """Return the files below `vllm/` that the worktree of `repository` changes.

    Raises:
        UsageError: A file is new, gone or of another kind; a patch changes files that are there.
    """
    repository.run("add", "--all", "--", "*.py")
    rows = repository.run("diff", "HEAD", "--name-status", "--", "vllm").splitlines()
    if others := [row.replace("\t", " ") for row in rows if not row.startswith("M\t")]:
        raise UsageError(
            f"the worktree has files that are new, gone or of another kind: {', '.join(others)}",
            expected="changes inside of files that the release has",
            next_step="put new code into vllm_overlay/ and the release's files back, then the same "
            "command again",
        )
    return [row.partition("\t")[2] for row in rows]

"""One fix in a worktree, and its patch written back from there."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

from scripts.commits.patches import DATE, commit_hooks, patch_text, release_repository
from scripts.patchset.documents import documents
from scripts.patchset.registry import load_registry
from scripts.patchset.series import load_series, patch_names, releases_by_line, series_file
from scripts.patchset.target import Target
from scripts.project import PATCHES, ROOT
from scripts.system.console import out
from scripts.system.errors import UsageError
from scripts.system.files import replace_text
from scripts.system.git import Repository

WORKTREE = ROOT / ".work" / "edit"
_STATE = WORKTREE / ".git" / "kvfix.json"


def start(target: Target, fix_id: str) -> None:
    """Lay out the worktree for fix `fix_id` on `target`.

    Raises:
        UsageError: There is no such fix, or an edit is not finished.
    """
    registry = load_registry()
    if fix_id not in registry.fixes:
        raise UsageError(
            f"patches/fixes.toml has no fix {fix_id}",
            expected=f"one of {', '.join(registry.fixes)}",
            next_step="write its [[fix]] table first, as CONTRIBUTING.md says",
        )
    if WORKTREE.exists():
        raise UsageError(
            f"{WORKTREE.relative_to(ROOT)} holds an edit that is not finished",
            expected="no worktree",
            next_step="nox -s edit -- --continue, or: nox -s edit -- --abort",
        )
    patches = target.patches
    ids = [patch.fix_id for patch in patches]
    count = ids.index(fix_id) + 1 if fix_id in ids else len(ids)
    try:
        repository = release_repository(target.release, WORKTREE, registry)
        stock = f"v{target.release}"
        commits = [stock, *commit_hooks(repository, stock, patches[:count], registry)]
        repository.run("reset", "--quiet", "--hard", commits[-1])
        # What is edited shows as an uncommitted change against everything that comes before it.
        parent = commits[-2] if fix_id in ids else commits[-1]
        repository.run("reset", "--quiet", "--soft", parent)
        _STATE.write_text(json.dumps({"line": target.line, "fix": fix_id}), encoding="utf-8")
    except BaseException:
        shutil.rmtree(WORKTREE, ignore_errors=True)
        raise
    where = WORKTREE.relative_to(ROOT)
    out.print(f"Edit {where}/vllm (git -C {where} diff HEAD), then: nox -s edit -- --continue")


def restamp() -> None:
    """Make anew what `patches/fixes.toml` determines: messages of patches, and documents."""
    registry = load_registry()
    for line, releases in releases_by_line().items():
        patches = load_series(line).patches
        with tempfile.TemporaryDirectory() as folder:
            repository = release_repository(releases[-1], Path(folder), registry)
            commits = commit_hooks(repository, "HEAD", patches, registry)
            for patch, commit in zip(patches, commits, strict=True):
                replace_text(PATCHES / line / patch.name, patch_text(repository, commit))
    for path, text in documents(registry).items():
        replace_text(path, text)


def finish() -> None:
    """Write the patch from what the worktree holds, and remove the worktree.

    Raises:
        UsageError: There is no edit, it changes nothing, or more than upstream's own files.
    """
    if not _STATE.is_file():
        raise UsageError(
            "there is no edit to continue",
            expected=f"a worktree in {WORKTREE.relative_to(ROOT)}",
            next_step="nox -s edit -- <release> <fix>",
        )
    state = json.loads(_STATE.read_text(encoding="utf-8"))
    line, registry = state["line"], load_registry()
    fix = registry.fixes[state["fix"]]
    repository = Repository(WORKTREE)
    changed = changed_files(repository)
    if not changed:
        raise UsageError(
            f"the worktree changes nothing, so fix {fix.id} would have an empty patch",
            expected="at least one changed file below vllm/",
            next_step=f"edit {WORKTREE.relative_to(ROOT)}/vllm, or: nox -s edit -- --abort",
        )
    files = {path: (WORKTREE / path).read_bytes() for path in changed}
    head = repository.run("rev-parse", "HEAD").strip()
    text = export_one(repository, head, files, fix.id)
    replace_text(PATCHES / line / fix.file_name, text)
    names = patch_names(line)
    if fix.file_name not in names:
        replace_text(series_file(line), "".join(f"{name}\n" for name in (*names, fix.file_name)))
    shutil.rmtree(WORKTREE)
    out.print(f"Wrote patches/{line}/{fix.file_name}. Now: nox -s lint")


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
            next_step="put new code into vllm_overlay/, and the release's files back",
        )
    return [row.partition("\t")[2] for row in rows]


def export_one(repository: Repository, parent: str, files: dict[str, bytes], fix_id: str) -> str:
    """Commit `files` as the hooks of fix `fix_id` on top of `parent`; return the patch's text."""
    registry = load_registry()
    message = registry.message(registry.fixes[fix_id])
    commit = repository.commit(parent, files, message, author=registry.author, date=DATE)
    return patch_text(repository, commit)

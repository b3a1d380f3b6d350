"""A series as commits, and each commit as a git-am mbox: the form in which patches leave the house.

The same series gives the same bytes: messages come from the registry, dates are constant.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from scripts.patchset.patch import Patch, apply_patches
from scripts.patchset.registry import Registry
from scripts.system.git import Repository, identity
from scripts.upstream.tree import release_tree

DATE = "2026-01-01T00:00:00+00:00"  # a patch carries no clock


def release_repository(release: str, folder: Path, registry: Registry) -> Repository:
    """Make a repository in `folder` whose one commit is the `vllm/` of `release`, checked out."""
    repository = Repository.init(folder)
    shutil.copytree(release_tree(release) / "vllm", folder / "vllm", dirs_exist_ok=True)
    repository.run("add", "--all", "--force")
    repository.run(
        "commit", "--quiet", "-m", f"vLLM {release}", env=identity(registry.author, DATE)
    )
    repository.run("tag", f"v{release}")
    return repository


def commit_hooks(
    repository: Repository, base: str, patches: Sequence[Patch], registry: Registry
) -> list[str]:
    """Commit the hooks of `patches` on top of `base`, one commit each; return the commits.

    Raises:
        PatchDoesNotApplyError: A hunk has no place, or several.
    """
    commits: list[str] = []
    texts: dict[str, str] = {}
    with repository.committing(registry.author, DATE) as store:
        for patch in patches:
            before = {p: texts.get(p) or repository.read(base, p) or "" for p in patch.files}
            after, _ = apply_patches([patch], before.__getitem__)
            texts |= after
            files = {path: text.encode() for path, text in after.items()}
            message = registry.message(registry.fix(patch.fix_id))
            commits.append(store(commits[-1] if commits else base, files, message))
    return commits


def patch_text(repository: Repository, commit: str) -> str:
    """Return `commit` as a git-am mbox."""
    return repository.run(
        "format-patch", "--stdout", "--zero-commit", "--no-signature", "--abbrev=12",
        "--no-attach", "--no-renames", "--stat=72", "--no-numbered", "--no-base", "--no-notes",
        "--no-to", "--no-cc", "--no-add-header",
        "-1", commit,
    )  # fmt: skip

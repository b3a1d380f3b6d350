"""The fixes for other forks of vLLM: mboxes and a git bundle in a folder of their own."""

from __future__ import annotations

import filecmp
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from shlex import quote

from scripts.commits.closure import Closure
from scripts.commits.fixes import branch_name, commit_fixes
from scripts.commits.patches import patch_text, release_repository
from scripts.patchset.patch import Patch
from scripts.patchset.registry import Registry
from scripts.patchset.series import load_series
from scripts.project import project
from scripts.system.console import err
from scripts.system.errors import CheckFailedError, UsageError
from scripts.system.files import working_folder
from scripts.system.git import Repository


def write_export(release: str, patches: Sequence[Patch], registry: Registry, folder: Path) -> bool:
    """Write the mboxes and the bundle of `patches` into the new folder `folder`.

    Returns:
        Whether it was written: a folder that holds the very same is left alone.

    Raises:
        PatchDoesNotApplyError: A hunk has no place, or several.
        CheckFailedError: A commit could not be imported.
        UsageError: The folder holds something else, or is a file.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(
            f"{folder} is a file",
            expected="a folder, or a name that is free",
            next_step="name another one with --out",
        )
    err.print(f"{release}: a commit for each of {len(patches)} fixes, and for each alone ...")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with working_folder(folder) as work:
        repository = release_repository(release, work / "repository", registry)
        branches = commit_branches(repository, release, patches, registry)
        _check(repository, f"v{release}", branches)
        result = work / "result"
        _write(repository, release, patches, registry, branches, result)
        if folder.exists() and any(folder.iterdir()):
            if _same(result, folder):
                return False
            if not _is_export(folder):
                raise UsageError(
                    f"{folder} holds something else than an export",
                    expected="a folder that is not there yet, or is empty",
                    next_step="name another one with --out",
                )
            raise UsageError(
                f"{folder} is an export, but not what would be written now",
                expected="no such folder, or one that holds the same export",
                next_step=f"rm -r {quote(str(folder))}, or name another one with --out",
            )
        result.rename(folder)
    return True


def _is_export(folder: Path) -> bool:
    """Whether a folder holds what an export has, and nothing else on its first level."""
    names = {path.name for path in folder.iterdir() if path.suffix != ".bundle"}
    return names == {"README.md", "alone", "series"}


def commit_branches(
    repository: Repository, release: str, patches: Sequence[Patch], registry: Registry
) -> dict[str, list[str]]:
    """Make all branches on top of tag `v<release>`; return the commits of each, by its name."""
    stock = f"v{release}"
    chosen = {branch_name(release): patches}
    for patch in patches:
        wanted = registry.with_dependencies({patch.fix_id})
        alone = [one for one in patches if one.fix_id in wanted]
        chosen[branch_name(release, patch.fix_id)] = alone
    made, _ = commit_fixes(repository, stock, registry, [*chosen.values()])
    branches = dict(zip(chosen, made, strict=True))
    for name, commits in branches.items():
        repository.run("branch", name, commits[-1])
    repository.run("branch", branch_name(release, "stock"), stock)
    return branches


def _check(repository: Repository, stock: str, branches: dict[str, list[str]]) -> None:
    commits = dict.fromkeys(commit for of_branch in branches.values() for commit in of_branch)
    with repository.blobs() as read:
        closure = Closure(repository, read)
        faults = [
            f"{repository.run('show', '-s', '--format=%s', commit).strip()}: {fault}"
            for commit in commits
            for fault in closure.faults(stock, commit)
        ]
    for fault in faults:
        err.print(f"✗ {fault}", markup=False)
    if faults:
        raise CheckFailedError(
            f"{len(faults)} faults",
            expected="every commit can be imported",
            next_step="correct the fix's imports or its depends-on, then: nox -s lint",
        )


def _write(
    repository: Repository,
    release: str,
    patches: Sequence[Patch],
    registry: Registry,
    branches: dict[str, list[str]],
    folder: Path,
) -> None:
    (folder / "series").mkdir(parents=True)
    (folder / "alone").mkdir()
    whole = branches[branch_name(release)]
    texts = cache(partial(patch_text, repository))
    for number, (patch, commit) in enumerate(zip(patches, whole, strict=True), start=1):
        name = registry.fix(patch.fix_id).name
        target = folder / "series" / f"{number:04d}-{name}.patch"
        target.write_bytes(texts(commit).encode())
        alone = branches[branch_name(release, patch.fix_id)]
        target = folder / "alone" / f"{name}.mbox"
        target.write_bytes("".join(map(texts, alone)).encode())
    names = [branch_name(release, "stock"), *branches]
    bundle = (folder / _bundle(release)).absolute()  # git runs in the repository's folder
    repository.run(
        "bundle", "create", "--quiet", "--version=2", str(bundle),
        *(f"refs/heads/{name}" for name in names),
    )  # fmt: skip
    (folder / "README.md").write_text(_readme(release, patches, registry), encoding="utf-8")


def _bundle(release: str) -> str:
    return f"kvfix-v{release}.bundle"


def _readme(release: str, patches: Sequence[Patch], registry: Registry) -> str:
    branch, stock = branch_name(release), branch_name(release, "stock")
    rows = []
    held = [patch.fix_id for patch in patches]
    whole = set(held) == {*load_series(release).fix_ids}
    chosen = "" if whole else f" --fix {','.join(held)}"
    for patch in patches:
        fix = registry.fix(patch.fix_id)
        needs = ", ".join(other for other in fix.depends_on if other in held) or "-"
        rows.append(f"| {fix.id} | {fix.title} | {needs} | {branch_name(release, fix.id)} |\n")
    return f"""\
# {len(patches)} fixes for vLLM {release}, by kvfix {project().version}
Made by `nox -s export -- {release}{chosen}`. Every commit holds what it needs of `vllm_overlay/`.

In a clone of vLLM {release}, or of a fork of it, all of them:

    git am --keep-non-patch series/*.patch

or, as branch `{branch}` on top of the release's own files:

    git fetch {_bundle(release)} 'refs/heads/*:refs/heads/*'
    git cherry-pick {stock}..{branch}

One of them, with what it depends on:

    git am --keep-non-patch alone/ID-….mbox
    git cherry-pick {stock}..{branch_name(release, "ID")}

Several, but not all: `nox -s export -- {release} --fix ID,ID`. Taken
one by one, two fixes of one file conflict in the line near its top that names them.

Build the wheel as upstream does; nothing is compiled where a wheel of the release is at hand:

    SETUPTOOLS_SCM_PRETEND_VERSION={release}+kvfix.{project().version} \\
    VLLM_TARGET_DEVICE=cuda VLLM_USE_PRECOMPILED=1 VLLM_SKIP_PRECOMPILED_VERSION_SUFFIX=1 \\
    VLLM_PRECOMPILED_WHEEL_LOCATION=/path/to/vllm-{release}-….whl \\
        pip wheel --no-deps .

Without the first setting a branch that has no tags has no version; without the second a machine
that has no GPU builds for its CPU.

| fix | what is true after it | needs | alone on branch |
|---|---|---|---|
{"".join(rows)}"""


def _same(one: Path, other: Path) -> bool:
    names, others = (
        sorted(p.relative_to(top) for p in top.rglob("*") if p.is_file()) for top in (one, other)
    )
    return names == others and all(
        filecmp.cmp(one / name, other / name, shallow=False) for name in names
    )

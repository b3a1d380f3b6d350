"""`nox -s export`: the fixes for other forks of vLLM, as mboxes and as git branches.

    nox -s export -- 0.20.2                 dist/export-0.20.2/: mboxes and a git bundle
    nox -s export -- 0.20.2 --into DIR      branch kvfix/v0.20.2 on top of HEAD in your own clone
    nox -s export -- 0.20.2 --prove         runs each commit's tests, and a fork's own build
    nox -s export -- 0.20.2 --fix 40449     these fixes only, and what they depend on; repeatable

Each commit holds the hooks of one fix, the overlay files that it is the first to need, and its
provenance. On branch kvfix/v<release> a fix builds on those before it: they share overlay files,
and the line near the top of a changed file that names them. To be taken alone, each fix has a
branch kvfix/v<release>-<id> besides, with its dependencies and itself on top of the stock release.
"""

from __future__ import annotations

import argparse
import filecmp
import tempfile
from collections.abc import Sequence
from pathlib import Path

from scripts.branch import branch_name, commit_fixes
from scripts.closure import Closure
from scripts.export import patch_text, release_repository
from scripts.fork_proof import prove_export
from scripts.patchset.listing import list_fixes
from scripts.patchset.patch import Patch
from scripts.patchset.registry import Registry, load_registry
from scripts.patchset.series import load_series
from scripts.project import DIST, project, supported_release
from scripts.system.console import entry, err, out
from scripts.system.errors import CheckFailedError, UsageError
from scripts.system.git import Repository
from scripts.tree import apply_to_tree
from scripts.upstream.lock import locked_release


def main() -> None:
    """Write what the command line asks for."""
    options = _arguments()
    release = supported_release(options.release)
    registry = load_registry()
    patches = _selected(release, options.fix, registry)
    if options.into is not None:
        branch = branch_name(release)
        offsets = apply_to_tree(options.into, branch, release, patches, registry)
        out.print(f"wrote branch {branch} in {options.into}", style="bold", markup=False)
        list_fixes(patches, registry, offsets)
        out.print(f"use it: git -C {options.into} switch {branch}", markup=False)
        return
    if options.prove:
        _prove(release, patches, registry)
        return
    folder = options.out or DIST / f"export-{release}"
    written = write_export(release, patches, registry, folder)
    verb = "wrote" if written else "nothing has changed: there already is"
    out.print(f"{verb} {folder}", style="bold", markup=False)
    list_fixes(patches, registry, ())
    out.print(f"use it: {folder / 'README.md'} says how", markup=False)


def _prove(release: str, patches: Sequence[Patch], registry: Registry) -> None:
    faults = prove_export(release, patches, registry)
    for fault in faults:
        err.print(f"✗ {fault}", markup=False)
    if faults:
        raise CheckFailedError(
            f"{len(faults)} faults",
            expected="each commit turns its own tests; the build has the files of `apply`'s wheel",
            next_step=f"see reports/export-{release}.json",
        )
    out.print(f"each of {len(patches)} commits turns its own tests, and the fork builds")


def write_export(release: str, patches: Sequence[Patch], registry: Registry, folder: Path) -> bool:
    """Write the mboxes and the bundle of `patches` into the new folder `folder`.

    Returns:
        Whether it was written: a folder that holds the very same is left alone.

    Raises:
        PatchDoesNotApplyError: A hunk has no place, or several.
        CheckFailedError: A commit could not be imported.
        UsageError: The folder holds something else.
    """
    err.print(f"{release}: a commit for each of {len(patches)} fixes, and for each alone ...")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as work:
        repository = release_repository(release, Path(work, "repository"), registry)
        branches = commit_branches(repository, release, patches, registry)
        _check(repository, f"v{release}", branches)
        result = Path(work, "result")
        _write(repository, release, patches, registry, branches, result)
        if folder.exists():
            if _same(result, folder):
                return False
            raise UsageError(
                f"{folder} exists, and is not what would be written now",
                expected="no such folder, or one that holds the same export",
                next_step=f"rm -r {folder}, or name another one with --out",
            )
        result.rename(folder)
    return True


def commit_branches(
    repository: Repository, release: str, patches: Sequence[Patch], registry: Registry
) -> dict[str, list[str]]:
    """Make all branches on top of tag `v<release>`; return the commits of each, by its name."""
    stock = f"v{release}"
    branches = {}
    for fix_id in ("", *(patch.fix_id for patch in patches)):
        wanted = registry.with_dependencies({fix_id}) if fix_id else {p.fix_id for p in patches}
        chosen = [patch for patch in patches if patch.fix_id in wanted]
        name = branch_name(release, fix_id)
        branches[name], _ = commit_fixes(repository, stock, chosen, registry)
        repository.run("branch", name, branches[name][-1])
    repository.run("branch", branch_name(release, "stock"), stock)
    return branches


def _check(repository: Repository, stock: str, branches: dict[str, list[str]]) -> None:
    closure = Closure(repository)
    commits = dict.fromkeys(commit for of_branch in branches.values() for commit in of_branch)
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
    for number, (patch, commit) in enumerate(zip(patches, whole, strict=True), start=1):
        target = folder / "series" / f"{number:04d}-{patch.name}"
        target.write_bytes(patch_text(repository, commit).encode())
        alone = branches[branch_name(release, patch.fix_id)]
        target = folder / "alone" / Path(patch.name).with_suffix(".mbox")
        target.write_bytes("".join(patch_text(repository, one) for one in alone).encode())
    names = [branch_name(release, "stock"), *branches]
    repository.run(
        "bundle", "create", "--quiet", "--version=2", str(folder / _bundle(release)),
        *(f"refs/heads/{name}" for name in names),
    )  # fmt: skip
    (folder / "README.md").write_text(_readme(release, patches, registry), encoding="utf-8")


def _bundle(release: str) -> str:
    return f"kvfix-v{release}.bundle"


def _readme(release: str, patches: Sequence[Patch], registry: Registry) -> str:
    branch, stock = branch_name(release), branch_name(release, "stock")
    rows = []
    held = {patch.fix_id for patch in patches}
    for patch in patches:
        fix = registry.fix(patch.fix_id)
        needs = ", ".join(other for other in fix.depends_on if other in held) or "-"
        rows.append(f"| {fix.id} | {fix.title} | {needs} | {branch_name(release, fix.id)} |\n")
    return f"""\
# {len(patches)} fixes for vLLM {release}, by kvfix {project().version}
Made by `nox -s export -- {release}`. Every commit holds what it needs of `vllm_overlay/`.

In a clone of vLLM {release}, or of a fork of it, all of them:

    git am --keep-non-patch series/*.patch

or, as branch `{branch}` on top of the release's own files:

    git fetch {_bundle(release)} 'refs/heads/*:refs/heads/*'
    git cherry-pick {stock}..{branch}

One of them, with what it depends on:

    git am --keep-non-patch alone/ID-….mbox
    git cherry-pick {stock}..{branch_name(release, "ID")}

Several, but not all: `nox -s export -- {release} --fix ID --fix ID`. Taken
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


def _selected(release: str, ids: Sequence[str] | None, registry: Registry) -> tuple[Patch, ...]:
    series = load_series(locked_release(release).line)
    if unknown := set(ids or ()) - {*series.fix_ids}:
        raise UsageError(
            f"the line of {release} has no fix {', '.join(sorted(unknown))}",
            expected=f"some of {', '.join(series.fix_ids)}",
            next_step=f"nox -s export -- {release}",
        )
    return series.only(ids, registry) if ids else series.patches


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="nox -s export --",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("release", nargs="?", default=project().default_release)
    parser.add_argument("--fix", action="append", metavar="ID", help="only these; repeatable")
    target = parser.add_mutually_exclusive_group()
    target.add_argument("--into", type=Path, metavar="DIR", help="a clone of vLLM or of a fork")
    target.add_argument("--prove", action="store_true", help="run each commit, and a build")
    target.add_argument("--out", type=Path, metavar="DIR", help="a folder that is not there yet")
    return parser.parse_args()


if __name__ == "__main__":
    entry(main)

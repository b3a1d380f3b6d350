"""What was carried, proven in a copy of this repository, and then put into place.

The copy is a whole patch set: the patches, the declaration, the registry and the documents. Lint,
the regression tests and the simulation run there, as they would here. Until all have passed nothing
here changes; then each file is replaced in one step, patches of later releases first, so that those
that are carried have at each moment what they had, and the declaration that names the release
comes last. A landing that was killed goes on with `nox -s rebase -- --continue`.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path

from packaging.version import Version

from scripts.carry.merge import Status
from scripts.carry.state import WORK, State
from scripts.commits.stored import Change, Differ, newest_first, stored, write
from scripts.patchset.patch import Patch
from scripts.patchset.registry import Fix, Registry, load_registry
from scripts.patchset.series import carried_releases
from scripts.project import ROOT, project
from scripts.system.console import err, out
from scripts.system.errors import CheckFailedError, UsageError
from scripts.system.files import replace_text
from scripts.system.git import Repository
from scripts.system.process import run
from scripts.upstream.lock import load_lock

CHECKOUT = WORK / "checkout"
_BEFORE = WORK / "before"
_DECLARATION = "pyproject.toml"
# What landing may change; everything else is a person's.
_OURS = ("patches", "docs", "records", "reports", "README.md", _DECLARATION)
# Kept between two proofs: environments and what makes the second lint quick.
_KEPT = (".nox", ".work", ".mypy_cache", ".ruff_cache")
_NOT_COPIED = shutil.ignore_patterns(".git", *_KEPT, "dist", "__pycache__", ".pytest_cache")


def prove_in_copy(state: State, repository: Repository, commits: dict[str, str]) -> None:
    """Make the patch set with the release in a copy of this repository, and test it there.

    Args:
        state: The rebase.
        repository: The worktree's.
        commits: The carried fixes there, oldest first.

    Raises:
        CheckFailedError: What was carried is not what the registry says that the release needs,
            lint or the regression tests fail, or the simulation finds what stock does not show;
            nothing here was changed.
        PatchDoesNotApplyError: The commits cannot be applied in the order of the registry.
    """
    registry = load_registry()
    _copy()
    patches = CHECKOUT / "patches"
    replace_text(CHECKOUT / _DECLARATION, declared(_read(CHECKOUT / _DECLARATION), state.release))
    for result in state.results:
        fix = registry.fix(result.fix)
        if result.status is Status.UPSTREAM:
            text = _read(patches / "fixes.toml")
            replace_text(patches / "fixes.toml", without_release(text, fix, state.release))
    registry = load_registry(patches / "fixes.toml")
    _check_needed(state.release, commits, registry)
    change = Change(
        state.release, _patches(repository, state.release, commits, registry), alone=True
    )
    releases = {*carried_releases(), state.release}
    write(stored(registry, releases, change, patches), registry, patches)
    report = [
        {**asdict(r), "status": r.status.value, "proof": r.proof.value} for r in state.results
    ]
    document = {"release": state.release, "from": state.sources[0], "fixes": report}
    name = f"rebase-{state.release}.json"
    replace_text(CHECKOUT / "reports" / name, json.dumps(document, indent=2) + "\n")
    _run("edit", "--restamp")
    _run("lint")
    _run("regressions", state.release)
    _run("simulate", state.release)


def _check_needed(release: str, commits: Collection[str], registry: Registry) -> None:
    """Compare what was carried with what the registry will have applied to `release`.

    A file serves every later release that needs its fix, so what was left out would be applied
    all the same, untested, unless the registry says so.

    Raises:
        CheckFailedError: They differ.
    """
    needed = [fix.id for fix in registry.fixes.values() if fix.needed_on(release)]
    faults = [
        *(
            f"fix {one} applies to {release} and has no patch"
            for one in needed
            if one not in commits
        ),
        *(
            f"fix {one} was carried to {release}, which fixes.toml says does not need it"
            for one in commits
            if one not in needed
        ),
    ]
    if faults:
        raise CheckFailedError(
            "; ".join(faults),
            expected="what was carried is what fixes.toml says that the release needs",
            next_step="correct applies-to in patches/fixes.toml, or say in [[fix.unpatched]] "
            "(releases, reason) why there is no patch; then: nox -s rebase -- --continue",
        )


def _patches(
    repository: Repository, release: str, commits: dict[str, str], registry: Registry
) -> dict[str, Patch]:
    """Return the patches, by fix, that the commits of the worktree make."""
    patches = {}
    with tempfile.TemporaryDirectory() as folder:
        differ = Differ(Path(folder))
        for fix_id, commit in commits.items():
            names = repository.run("diff", "--name-only", f"{commit}^", commit).splitlines()
            before, after = (
                {name: repository.read(revision, name) or "" for name in names}
                for revision in (f"{commit}^", commit)
            )
            patches[fix_id] = differ.patch(registry.fix(fix_id), release, before, after)
    return patches


def _copy() -> None:
    """Make the copy anew, and remember what it was made from."""
    CHECKOUT.mkdir(parents=True, exist_ok=True)
    for path in CHECKOUT.iterdir():
        if path.name not in _KEPT:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.copytree(ROOT, CHECKOUT, ignore=_NOT_COPIED, dirs_exist_ok=True, symlinks=True)
    environments = CHECKOUT / ".nox"
    if not environments.is_symlink():
        (ROOT / ".nox").mkdir(exist_ok=True)
        environments.symlink_to(ROOT / ".nox")
    shutil.rmtree(_BEFORE, ignore_errors=True)
    for name, path in _files(CHECKOUT).items():
        (_BEFORE / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, _BEFORE / name)


def _files(folder: Path) -> dict[str, Path]:
    paths = [folder / name for name in _OURS]
    files = [one for path in paths for one in (path, *path.rglob("*")) if one.is_file()]
    return {path.relative_to(folder).as_posix(): path for path in files}


def declared(text: str, release: str) -> str:
    """Return `pyproject.toml` with `release` among the releases, in the order of versions."""
    releases = sorted({*project().releases, release}, key=Version)
    words = ", ".join(f'"{one}"' for one in releases)
    return re.sub(r"^releases = \[[^]]*\]", f"releases = [{words}]", text, flags=re.MULTILINE)


def without_release(text: str, fix: Fix, release: str) -> str:
    """Return `fixes.toml` where `fix` does not apply to `release`, nor to what lies beyond it.

    Beyond means away from the releases that are supported today; there is nothing beyond a release
    that lies between two of them. `fixed-in` is set where the
    release just before is one that has the fix's patch, for then no other can be the first.
    """
    supported = [Version(one) for one in project().releases if fix.affects(one)]
    if not supported or not fix.affects(release):
        return text
    newer = Version(release) > max(supported)
    older = Version(release) < min(supported)
    bound = f"<{release}" if newer else f">{release}" if older else f"!={release}"
    values = {"applies-to": f"{fix.applies_to},{bound}"}
    earlier = [Version(one) for one in load_lock() if Version(one) < Version(release)]
    if newer and not fix.fixed_in and earlier and max(earlier) == max(supported):
        values["fixed-in"] = release
    head, mark, rest = text.partition(f'\nid = "{fix.id}"\n')
    for key, value in values.items():
        rest = re.sub(rf'^{key} = "[^"]*"', f'{key} = "{value}"', rest, count=1, flags=re.MULTILINE)
    return head + mark + rest


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _run(tool: str, *words: str) -> None:
    """Run one of the tools in the copy.

    Raises:
        CheckFailedError: It fails.
    """
    err.print(f"{tool} {' '.join(words)} ...")
    command = [sys.executable, "-m", f"scripts.commands.{tool}", *words]
    result = run(command, cwd=CHECKOUT, check=False, stream=True)
    if result.returncode:
        tree = (WORK / "tree").relative_to(ROOT)
        raise CheckFailedError(
            f"{tool} failed on what was carried (exit code {result.returncode}, see above); "
            "nothing was changed",
            expected="what lint, the regression tests and the simulation accept",
            next_step=f"amend the fix's commit in {tree}, or correct the overlay, "
            "patches/fixes.toml or the tests here; then: nox -s rebase -- --continue",
        )


def changes() -> dict[str, Path | None]:
    """Return the files of the copy that are new or changed, by path; None for one that is gone.

    Patches of later releases come first, then the rest, what is gone, and the declaration.
    """
    before, after = _files(_BEFORE), _files(CHECKOUT)
    changed = {
        name: path
        for name, path in after.items()
        if name not in before or before[name].read_bytes() != path.read_bytes()
    }
    patches = newest_first([name for name in changed if name.endswith(".patch")])
    others = sorted(changed.keys() - {*patches, _DECLARATION})
    gone = sorted(before.keys() - after.keys())
    names = [*patches, *others, *gone, *(name for name in changed if name == _DECLARATION)]
    return {name: changed.get(name) for name in names}


def land(state: State) -> None:
    """Put what was proven into place; what is there already is left alone.

    Raises:
        UsageError: A file has changed since the proof began.
    """
    changed = changes()
    moved = [name for name, path in changed.items() if not _is_expected(name, path)]
    if moved:
        raise UsageError(
            f"changed while the proof ran: {', '.join(moved)}",
            expected="the files that were proven",
            next_step="undo those changes, then: nox -s rebase -- --continue; or give up: "
            "nox -s rebase -- --abort",
        )
    for name, path in changed.items():
        if path is None:
            (ROOT / name).unlink(missing_ok=True)
        else:
            replace_text(ROOT / name, _read(path))
    _say(state, changed)


def _is_expected(name: str, path: Path | None) -> bool:
    here, before = ROOT / name, _BEFORE / name
    if not here.is_file():
        return path is None or not before.is_file()
    return here.read_bytes() in [
        one.read_bytes() for one in (path, before) if one and one.is_file()
    ]


def _say(state: State, names: Collection[str]) -> None:
    def count(*wanted: Status) -> int:
        return sum(result.status in wanted for result in state.results)

    by_tool = count(Status.CARRIED, Status.OFFSETS, Status.MERGED)
    out.print(
        f"vLLM {state.release} is proven and in place: {by_tool} fixes carried by the tool, "
        f"{count(Status.RESOLVED)} by hand, {count(Status.UPSTREAM)} upstream, "
        f"{count(Status.NOT_AFFECTED)} not affected, {count(Status.SKIPPED)} left out; "
        f"{len(names)} files. Now name it in CHANGELOG.md and commit."
    )

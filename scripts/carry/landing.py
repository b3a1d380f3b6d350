"""What was carried, proven in a copy of this repository, and then put into place.

The copy is a whole patch set: the new line, the lock, the declaration, the registry and the
documents. Lint and the regression tests run there, as they would here. Until both have passed
nothing here changes; then each file is replaced in one step, a new line appears by one rename,
and the declaration that names the release comes last. A landing that was killed goes on with
`nox -s rebase -- --continue`.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from packaging.version import Version

from scripts.carry.merge import Status
from scripts.carry.state import WORK, State
from scripts.commits.patches import DATE, patch_text
from scripts.patchset.registry import Fix, Registry, load_registry
from scripts.patchset.series import Series, releases_by_line
from scripts.project import PATCHES, ROOT, project
from scripts.system.console import err, out
from scripts.system.errors import CheckFailedError, UsageError
from scripts.system.files import replace_text
from scripts.system.git import Repository
from scripts.system.process import run
from scripts.upstream.lock import load_lock, locked_release, render

CHECKOUT = WORK / "checkout"
_BEFORE = WORK / "before"
_DECLARATION = "pyproject.toml"
# What landing may change; everything else is a person's.
_OURS = ("patches", "docs", "records", "reports", "README.md", _DECLARATION)
# Kept between two proofs: environments and what makes the second lint quick.
_KEPT = (".nox", ".work", ".mypy_cache", ".ruff_cache")
_NOT_COPIED = shutil.ignore_patterns(".git", *_KEPT, "dist", "__pycache__", ".pytest_cache")


def prove_in_copy(
    state: State, series: Series, repository: Repository, commits: dict[str, str]
) -> None:
    """Make the patch set with the release in a copy of this repository, and test it there.

    Args:
        state: The rebase.
        series: The line that was carried.
        repository: The worktree's.
        commits: The carried fixes there, oldest first.

    Raises:
        CheckFailedError: Lint or the regression tests fail; nothing here was changed.
    """
    registry = load_registry()
    texts = _export(repository, commits, registry)
    line = _line(state, series, texts)
    _copy()
    patches = CHECKOUT / "patches"
    if not (line == series.line and _is_older(state.release, line)):
        for name, text in texts.items():
            replace_text(patches / line / name, text)
        replace_text(patches / line / "series", "".join(f"{name}\n" for name in texts))
    lock = load_lock()
    lock[state.release] = replace(lock[state.release], line=line)
    replace_text(patches / "upstream.lock", render(lock))
    replace_text(CHECKOUT / _DECLARATION, declared(_read(CHECKOUT / _DECLARATION), state.release))
    for result in state.results:
        fix = registry.fix(result.fix)
        if result.status is Status.UPSTREAM:
            text = _read(patches / "fixes.toml")
            replace_text(patches / "fixes.toml", without_release(text, fix, state.release))
    report = [
        {**asdict(r), "status": r.status.value, "proof": r.proof.value} for r in state.results
    ]
    document = {"release": state.release, "from": state.line, "line": line, "fixes": report}
    name = f"rebase-{state.release}.json"
    replace_text(CHECKOUT / "reports" / name, json.dumps(document, indent=2) + "\n")
    _run("edit", "--restamp")
    _run("lint")
    _run("regressions", state.release)


def _export(repository: Repository, commits: dict[str, str], registry: Registry) -> dict[str, str]:
    """Return the patches, by file name, that the commits of the worktree make."""
    texts = {}
    parent = ""
    for fix_id, commit in commits.items():
        fix = registry.fix(fix_id)
        parent = parent or f"{commit}^"
        paths = repository.run("diff", "--name-only", f"{commit}^", commit).splitlines()
        files = {path: (repository.read(commit, path) or "").encode() for path in paths}
        # A person may have amended it: message, author and date are the registry's.
        parent = repository.commit(
            parent, files, registry.message(fix), author=registry.author, date=DATE
        )
        texts[fix.file_name] = patch_text(repository, parent)
    return texts


def _line(state: State, series: Series, texts: dict[str, str]) -> str:
    """Return the line that the release belongs to: the carried one where it serves as it is."""
    exact = {Status.CARRIED, Status.OFFSETS}
    same = [patch.name for patch in series.patches] == list(texts)
    if same and all(result.status in exact for result in state.results):
        return series.line
    own = locked_release(state.release).line
    return f"v{state.release}" if own in releases_by_line() else own


def _is_older(release: str, line: str) -> bool:
    served = releases_by_line().get(line, [])
    return any(Version(one) > Version(release) for one in served)


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

    Beyond means away from the releases that are supported today. `fixed-in` is set where the
    release just before is one that has the fix's patch, for then no other can be the first.
    """
    supported = [Version(one) for one in project().releases if fix.affects(one)]
    if not supported or not fix.affects(release):
        return text
    newer = Version(release) > max(supported)
    bound = f"<{release}" if newer else f">{release}"
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
            expected="a line that lint and the regression tests accept",
            next_step=f"amend the fix's commit in {tree} (git rebase -i), or correct the overlay, "
            "patches/fixes.toml or the tests here; then: nox -s rebase -- --continue",
        )


def changes() -> dict[str, Path]:
    """Return the files of the copy that are new or changed, by path; the declaration last."""
    before, after = _files(_BEFORE), _files(CHECKOUT)
    changed = {
        name: path
        for name, path in after.items()
        if name not in before or before[name].read_bytes() != path.read_bytes()
    }
    return dict(sorted(changed.items(), key=lambda item: (item[0] == _DECLARATION, item[0])))


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
            next_step="undo those changes, then: nox -s rebase -- --continue; or start anew: "
            "nox -s rebase -- --abort",
        )
    for line in {name.split("/")[1] for name in changed if name.count("/") > 1}:
        source, target = CHECKOUT / "patches" / line, PATCHES / line
        if source.is_dir() and not target.exists():
            part = WORK / "landing"
            shutil.rmtree(part, ignore_errors=True)
            shutil.copytree(source, part)
            part.rename(target)
    for name, path in changed.items():
        replace_text(ROOT / name, _read(path))
    _say(state, list(changed))


def _is_expected(name: str, path: Path) -> bool:
    here, before = ROOT / name, _BEFORE / name
    known = [path.read_bytes(), *([before.read_bytes()] if before.is_file() else [])]
    return here.read_bytes() in known if here.is_file() else not before.is_file()


def _say(state: State, names: Sequence[str]) -> None:
    def count(*wanted: Status) -> int:
        return sum(result.status in wanted for result in state.results)

    by_tool = count(Status.CARRIED, Status.OFFSETS, Status.MERGED)
    out.print(
        f"vLLM {state.release} is proven and in place: {by_tool} fixes carried by the tool, "
        f"{count(Status.RESOLVED)} by hand, {count(Status.UPSTREAM)} upstream, "
        f"{count(Status.NOT_AFFECTED)} not affected, {count(Status.SKIPPED)} left out; "
        f"{len(names)} files. Now name it in CHANGELOG.md and commit."
    )

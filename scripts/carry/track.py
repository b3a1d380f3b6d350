"""New releases of the index, each pinned, carried and proven in a clone of this repository."""

from __future__ import annotations

import os
import re
import shutil
import sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from scripts.patchset.registry import load_registry
from scripts.project import ROOT
from scripts.system.console import err
from scripts.system.errors import CheckFailedError, CommandError, NeedsPersonError, UsageError
from scripts.system.git import Repository, identity
from scripts.system.process import run
from scripts.upstream.index import published
from scripts.upstream.lock import DISTRIBUTION, load_lock

WORK = ROOT / ".work" / "track"
_NEEDS_PERSON = (NeedsPersonError.exit_code, CheckFailedError.exit_code)
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


class Fate(Enum):
    """What became of a new release."""

    CARRIED = "carried"
    NEEDS_PERSON = "needs a person"


@dataclass(frozen=True)
class Tracked:
    """One new release: the verdict, the branch that is ready, and what `rebase` said."""

    release: str
    verdict: Fate
    branch: str
    said: str


def new_releases() -> list[str]:
    """Return the final releases of the index that are newer than the oldest pinned, and not pinned.

    A patch release of an older series counts as new, too.

    Raises:
        NetworkError: A source of the index settings does not answer.
    """
    lock = load_lock()
    oldest = next(iter(lock), "0")
    names = [str(version) for version in published(DISTRIBUTION)]
    known = names.index(oldest) + 1 if oldest in names else 0
    return [name for name in names[known:] if name not in lock]


def track() -> list[Tracked]:
    """Carry each new release, oldest first, up to the first that needs a person.

    Raises:
        UsageError: This is no git checkout.
        NetworkError: A source of the index settings does not answer.
        CommandError: One of the tools has failed.
    """
    here = Repository(ROOT)
    if not (ROOT / ".git").exists() or here.resolve("HEAD") is None:
        raise UsageError(
            "this copy of kvfix is no git checkout, so there is nothing to commit to",
            expected="a clone of kvfix",
            next_step="clone it, then: nox -s track",
        )
    tracked: list[Tracked] = []
    for release in new_releases():
        branch = f"carry/{release}"
        if here.resolve(f"refs/heads/{branch}"):
            said = "It was carried before: merge the branch, or delete it to carry the fixes anew."
            tracked.append(Tracked(release, Fate.CARRIED, branch, said))
            continue
        base = tracked[-1].branch if tracked else "HEAD"
        tracked.append(_carry(here, base, release, branch))
        if tracked[-1].verdict is Fate.NEEDS_PERSON:
            break
    return tracked


def _carry(here: Repository, base: str, release: str, branch: str) -> Tracked:
    err.print(f"vLLM {release} is new: pinning, carrying and proving it ...")
    clone = WORK / "kvfix"
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    try:
        here.run("clone", "--quiet", "--no-checkout", str(ROOT), str(clone))
        repository = Repository(clone)
        commit = here.run("rev-parse", base).strip()
        repository.run("checkout", "--quiet", "--detach", commit)
        (ROOT / ".nox").mkdir(exist_ok=True)
        (clone / ".nox").symlink_to(ROOT / ".nox")  # environments are made once
        _tool(clone, "lock", release)
        code, said = _tool(clone, "rebase", release)
        if code:
            return Tracked(release, Fate.NEEDS_PERSON, "", said)
        _commit(repository, commit, release)
        here.run("fetch", "--quiet", str(clone), f"HEAD:refs/heads/{branch}")
        return Tracked(release, Fate.CARRIED, branch, said)
    finally:
        shutil.rmtree(WORK, ignore_errors=True)


def _tool(clone: Path, name: str, *words: str) -> tuple[int, str]:
    """Run one of the clone's own tools; return its exit code and what it said.

    Raises:
        CommandError: It fails for another reason than that a person is needed.
    """
    command = [sys.executable, "-m", f"scripts.commands.{name}", *words]
    own = {"COLUMNS": "120", "NO_COLOR": "1", "PYTHONPATH": ""}
    result = run(command, cwd=clone, env=own, check=False)
    said = _ESCAPES.sub("", result.stdout + result.stderr).replace(f"{clone}{os.sep}", "")
    if result.returncode not in (0, *_NEEDS_PERSON) or (name == "lock" and result.returncode):
        raise CommandError(
            f"{name} {' '.join(words)} exited with {result.returncode}:\n{said[-4000:]}",
            expected="a verdict",
            next_step=f"see it here: nox -s lock -- {words[0]}"
            + (f", then: nox -s {name} -- {words[0]}" if name != "lock" else ""),
        )
    return result.returncode, said.strip()


def _commit(repository: Repository, parent: str, release: str) -> None:
    date = repository.run("show", "-s", "--format=%cI", parent).strip()
    # Not the symbolic link to the environments, which is no folder for .gitignore.
    paths = [name for name in ("patches", "docs", "records") if (repository.path / name).exists()]
    repository.run("add", "--all", "--", *paths, "README.md", "pyproject.toml")
    repository.run(
        "commit", "--quiet", "-m",
        f"Carry the fixes to vLLM {release}: linted, proven and simulated",
        env=identity(load_registry().author, date),
    )  # fmt: skip


def as_markdown(tracked: list[Tracked]) -> str:
    """Return the verdict as the text of an issue or a pull request."""
    if not tracked:
        return "Nothing to do: every final release of the index is pinned.\n"
    parts = []
    for one in tracked:
        branch = f", ready on branch `{one.branch}`" if one.branch else ""
        steps = f"`nox -s lock -- {one.release}`, then `nox -s rebase -- {one.release}`"
        command = "" if one.branch else f"\n\nGo on with {steps}."
        fence = "~" * (3 + max(map(len, re.findall("~+", one.said)), default=0))
        parts.append(
            f"## vLLM {one.release}: {one.verdict.value}{branch}\n"
            f"{fence}text\n{one.said}\n{fence}{command}\n"
        )
    return "\n".join(parts)

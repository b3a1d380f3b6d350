"""Small git repositories, and the patches that git makes from them."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

MESSAGE = """\
[kvfix 1] what is true after it

Symptom: a symptom.

Cause: a cause.

Fix: 1
Upstream-PR: owner/repo#1
Signed-off-by: A Person <a@example.org>
"""

# Nobody's settings: what a test wants to be set, it sets itself.
BARE = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_SYSTEM": os.devnull,
    "GIT_AUTHOR_NAME": "A Person",
    "GIT_AUTHOR_EMAIL": "a@example.org",
    "GIT_AUTHOR_DATE": "2026-01-01T00:00:00+00:00",
    "GIT_COMMITTER_NAME": "A Person",
    "GIT_COMMITTER_EMAIL": "a@example.org",
    "GIT_COMMITTER_DATE": "2026-01-01T00:00:00+00:00",
}


def git(folder: Path, *words: str, check: bool = True, **variables: str) -> str:
    """Run git as its user would, and return what it prints."""
    result = subprocess.run(
        ["git", *words],
        cwd=folder,
        env={**os.environ, **BARE, **variables},
        check=False,
        capture_output=True,
    )
    if check:
        assert result.returncode == 0, result.stderr.decode()
    return result.stdout.decode()


def write(folder: Path, files: Mapping[str, str | bytes]) -> None:
    """Write `files` below `folder`."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def commit(folder: Path, files: Mapping[str, str | bytes | None], message: str = MESSAGE) -> str:
    """Commit `files` (None: removed) in the repository `folder`, made where there is none."""
    if not (folder / ".git").exists():
        folder.mkdir(parents=True, exist_ok=True)
        git(folder, "init", "--quiet", "--initial-branch=main", "--template=")
    for name in [name for name, content in files.items() if content is None]:
        (folder / name).unlink()
    write(folder, {name: content for name, content in files.items() if content is not None})
    git(folder, "add", "--all", "--force")
    git(folder, "commit", "--quiet", "--allow-empty", "--cleanup=verbatim", "-m", message)
    return git(folder, "rev-parse", "HEAD").strip()


def mbox(folder: Path, *options: str) -> str:
    """Return the last commit as git-am mbox."""
    return git(folder, "format-patch", "--stdout", "--no-signature", "-1", *options)


def bare(diff: str) -> str:
    """Return a diff of git's without its `index` lines, as it is stored."""
    return re.sub(r"^index [0-9a-f]+\.\.[0-9a-f]+( \d+)?\n", "", diff, flags=re.MULTILINE)


def stored(folder: Path, *options: str, fix: str = "1-it", release: str = "0.20.2") -> str:
    """Return the last commit as a patch file of ours."""
    return f"Fix: {fix}\nServes: {release}\n" + bare(git(folder, "diff", *options, "HEAD~", "HEAD"))


def stored_of(
    folder: Path,
    before: Mapping[str, str | bytes],
    after: Mapping[str, str | bytes | None],
    *options: str,
) -> str:
    """Return, as a patch file of ours, what turns `before` into `after`."""
    commit(folder, before, "before")
    commit(folder, after)
    return stored(folder, *options)

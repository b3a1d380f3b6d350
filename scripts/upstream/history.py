"""vLLM's releases as git: made from the pinned sdists, or a real clone with its own tags.

The repository that is made lies in the cache. Each pinned release is one commit on top of the
release before it, tagged as upstream tags it, so `git log -p v0.20.2..v0.21.0 -- vllm/v1` shows
what a release changed. Ids depend on the lock alone: the same lock gives the same commits on every
machine, whether they were made one by one or together.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from packaging.version import InvalidVersion, Version

from scripts.system.console import err
from scripts.system.errors import GitError, NotLockedError, UnknownReleaseError
from scripts.system.files import only_process
from scripts.system.git import Repository, identity, import_data
from scripts.upstream.cache import cache_folder
from scripts.upstream.index import fetch
from scripts.upstream.lock import LockedRelease, load_lock

# What patches change, the tests, and what a build reads; documentation would double the size.
_FOLDERS = ("vllm", "tests", "requirements")
_AUTHOR = "vLLM <releases@vllm.invalid>"
_DATE = "1767225600 +0000"  # a release carries no clock


@dataclass(frozen=True)
class Upstream:
    """A bare repository with a tag `v<release>` for each release, and where it comes from."""

    repository: Repository
    origin: str

    def releases(self) -> list[str]:
        """Return the final releases that have a tag, oldest first."""
        versions = []
        for name in self.repository.run("tag", "--list", "v[0-9]*").split():
            try:
                version = Version(name[1:])
            except InvalidVersion:
                continue
            if not version.is_prerelease and f"v{version}" == name:
                versions.append(version)
        return [str(version) for version in sorted(versions)]

    def tag(self, release: str) -> str:
        """Return the tag of `release`.

        Raises:
            UnknownReleaseError: There is none.
        """
        if self.repository.resolve(f"refs/tags/v{release}") is None:
            raise UnknownReleaseError(
                f"{self.origin} has no tag v{release}",
                expected=f"one of {', '.join(self.releases()) or '(there is no tag)'}",
                next_step="name a clone that has it, or leave --upstream out: the pinned sdists "
                "serve as well",
            )
        return f"v{release}"

    def mentions(self, pull_request: str, after: str, upto: str) -> list[str]:
        """Return the commits, as one line each, that name a pull request between two releases.

        A clone's commits name theirs as `(#40449)`, on release branches too; the commits that are
        made from sdists name none.

        Args:
            pull_request: `owner/repository#number`; empty: none.
            after: Release whose history does not count.
            upto: Release whose history does.
        """
        number = pull_request.rpartition("#")[2]
        if not number:
            return []
        span = f"{self.tag(after)}..{self.tag(upto)}"
        return self.repository.run(
            "log", "--format=%h %s", "--fixed-strings", f"--grep=(#{number})", span
        ).splitlines()


def upstream(origin: str | None = None) -> Upstream:
    """Return vLLM's releases as git, brought up to date.

    Args:
        origin: URL or path of a repository with upstream's tags; None: the pinned sdists.

    Raises:
        GitError: The clone cannot be read, or one of its tags is no longer what it was.
        NotLockedError: Nothing is pinned.
        NetworkError: An sdist is not in the cache and the index cannot be reached.
    """
    return _pinned() if origin is None else _clone(origin)


def _pinned() -> Upstream:
    lock = load_lock()
    if not lock:
        raise NotLockedError(
            "patches/upstream.lock pins no release",
            expected="at least one",
            next_step="nox -s lock",
        )
    folder = cache_folder() / "upstream"
    folder.mkdir(parents=True, exist_ok=True)
    with only_process(folder, "makes the releases' repository") as only:
        repository = _repository(folder / "upstream.git", sweep=only)
        made = _made(repository)
        known = {message for _, _, _, message in made.values()}
        missing = [pinned for pinned in lock.values() if _message(pinned) not in known]
        if missing:
            err.print(f"storing {len(missing)} releases of vLLM as git (3 s each) ...")
        parent = ""
        for release, pinned in lock.items():
            commit, tree, onto, message = made.get(release, ("", "", "", ""))
            if message != _message(pinned):
                parent = _import(repository, pinned, parent)
            elif onto == parent:
                parent = commit
            else:  # another release lies below it now, or none; trees stay what they are
                parent = _move(repository, pinned, tree, parent)
    return Upstream(repository, "the pinned sdists")


def _repository(path: Path, *, sweep: bool) -> Repository:
    if sweep and path.is_dir():
        Repository(path).sweep()
    return Repository.init(path, bare=True)


def _made(repository: Repository) -> dict[str, tuple[str, str, str, str]]:
    """Return commit, tree, parent and message of each release that is there."""
    rows = repository.run(
        "for-each-ref",
        "--format=%(refname:lstrip=2)%00%(objectname)%00%(tree)%00%(parent)%00%(contents)%00",
        "refs/tags",
    )
    fields = rows.split("\0")
    return {
        fields[at].strip().removeprefix("v"): (
            fields[at + 1], fields[at + 2], fields[at + 3], fields[at + 4],
        )
        for at in range(0, len(fields) - 1, 5)
    }  # fmt: skip


def _message(pinned: LockedRelease) -> str:
    return f"vLLM {pinned.release}\n\nSdist-sha256: {pinned.sdist.sha256}\n"


def _import(repository: Repository, pinned: LockedRelease, parent: str) -> str:
    """Store one release from its sdist, without unpacking it; return the commit."""
    archive = fetch(pinned.sdist)
    message = _message(pinned).encode()
    tag = f"refs/tags/v{pinned.release}"
    # Without `--done` a process that dies half way would leave a tag on half a release.
    with repository.fed("fast-import", "--quiet", "--force", "--done") as (stream, _):
        who = f"{_AUTHOR} {_DATE}"
        stream.write(f"commit {tag}\nauthor {who}\ncommitter {who}\n".encode())
        stream.write(import_data(message))
        # A tag that is there would be taken for the parent.
        stream.write(b"from %s\n" % (parent or "0" * 40).encode())
        stream.write(b"deleteall\n")
        with tarfile.open(archive, "r|gz") as tar:
            for member in tar:
                path = member.name.partition("/")[2]
                top, below, _ = path.partition("/")
                if not member.isfile() or (below and top not in _FOLDERS):
                    continue
                mode = b"100755" if member.mode & 0o100 else b"100644"
                stream.write(b"M %s inline %s\ndata %d\n" % (mode, path.encode(), member.size))
                shutil.copyfileobj(tar.extractfile(member), stream)  # type: ignore[arg-type]
                stream.write(b"\n")
        stream.write(b"done\n")
    return repository.run("rev-parse", tag).strip()


def _move(repository: Repository, pinned: LockedRelease, tree: str, parent: str) -> str:
    """Put a release that is there on top of another parent; return its new commit."""
    onto = ["-p", parent] if parent else []
    words = ["-m", _message(pinned).rstrip("\n")]
    commit = repository.run(
        "commit-tree", tree, *onto, *words, env=identity(_AUTHOR, _DATE)
    ).strip()
    repository.run("update-ref", f"refs/tags/v{pinned.release}", commit)
    return commit


def _clone(origin: str) -> Upstream:
    local = Path(origin).expanduser()
    where = os.fspath(local.resolve()) if local.exists() else origin
    name = hashlib.sha256(where.encode()).hexdigest()[:16]
    folder = cache_folder() / "upstream"
    folder.mkdir(parents=True, exist_ok=True)
    with only_process(folder, "fetches upstream's tags") as only:
        repository = _repository(folder / f"{name}.git", sweep=only)
        err.print(f"fetching the tags of {where} ...", markup=False)
        try:
            repository.run(
                "fetch", "--no-tags", "--no-write-fetch-head", "--", where,
                "refs/tags/v*:refs/tags/v*",
            )  # fmt: skip
        except GitError as error:
            moved = "would clobber existing tag" in error.found
            raise GitError(
                error.found,
                expected="tags that are what they were" if moved else "a repository of vLLM",
                next_step="find out who moved it; to take the new one: "
                f"rm -r {quote(str(repository.path))}"
                if moved
                else "correct --upstream, or leave it out: the pinned sdists serve as well",
            ) from error
    return Upstream(repository, where)

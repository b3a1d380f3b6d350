"""The one gateway to git.

Every call pins the configuration that could change what it does: a user's `core.autocrlf`,
`diff.noprefix` or `format.*` must not reach a patch, and no hook or signing program may run.
"""

from __future__ import annotations

import datetime
import itertools
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from scripts.system.errors import GitError

if TYPE_CHECKING:
    from git.exc import GitCommandError

# Without git GitPython refuses to be imported, and nobody could say what is missing. It takes a
# quarter of a command's start, so only who runs git imports it.
os.environ["GIT_PYTHON_REFRESH"] = "quiet"

_PINNED = {
    "commit.gpgSign": "false",
    "core.abbrev": "12",
    "core.attributesFile": os.devnull,
    "core.autocrlf": "false",
    "core.bigFileThreshold": "512m",
    "core.compression": "-1",
    "core.eol": "lf",
    "core.fileMode": "true",
    "core.fsmonitor": "false",
    "core.hooksPath": os.devnull,
    "core.looseCompression": "1",
    "core.quotePath": "true",
    "core.safecrlf": "false",
    "diff.algorithm": "myers",
    "diff.context": "3",
    "diff.dstPrefix": "b/",
    "diff.external": "",
    "diff.indentHeuristic": "true",
    "diff.interHunkContext": "0",
    "diff.mnemonicPrefix": "false",
    "diff.noprefix": "false",
    "diff.orderFile": os.devnull,
    "diff.renames": "false",
    "diff.srcPrefix": "a/",
    "diff.suppressBlankEmpty": "false",
    "format.coverLetter": "false",
    "format.encodeEmailHeaders": "true",
    "format.from": "false",
    "format.mboxrd": "false",
    "format.noprefix": "false",
    "format.signOff": "false",
    "format.subjectPrefix": "PATCH",
    "format.thread": "false",
    "format.useAutoBase": "false",
    "gc.auto": "0",
    "i18n.commitEncoding": "utf-8",
    "i18n.logOutputEncoding": "utf-8",
    "init.defaultBranch": "main",
    "log.showSignature": "false",
    "pack.compression": "-1",
    "pack.depth": "50",
    "pack.threads": "1",  # with several, the bytes of a pack depend on how they run
    "pack.window": "1",  # an export in five sixths of the time, and 2 % larger than with 10
    "pack.windowMemory": "0",
    "status.showUntrackedFiles": "normal",
    "tag.gpgSign": "false",
}
# How the files of a checkout lie on its disk is its owner's business, and git is asked in those
# terms whether they have changed.
_OF_A_CHECKOUT = ("core.attributesFile", "core.autocrlf", "core.eol", "core.fileMode")
# Set where a git hook runs us, or by hand: each would lead to another repository or another diff.
_FOREIGN = (
    "GIT_ALTERNATE_OBJECT_DIRECTORIES",
    "GIT_COMMON_DIR",
    "GIT_DIFF_OPTS",
    "GIT_DIR",
    "GIT_EXTERNAL_DIFF",
    "GIT_INDEX_FILE",
    "GIT_NAMESPACE",
    "GIT_OBJECT_DIRECTORY",
    "GIT_PREFIX",
    "GIT_WORK_TREE",
)


class Repository:
    """A git checkout or bare repository at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def init(cls, path: Path, *, bare: bool = False) -> Repository:
        """Make an empty repository at `path`, or take the one that is there."""
        path.mkdir(parents=True, exist_ok=True)
        repository = cls(path)
        bare_or_not = ["--bare"] if bare else []
        repository.run("init", "--quiet", "--template=", "--object-format=sha1", *bare_or_not)
        return repository

    def sweep(self) -> None:
        """Remove what killed git processes have left in this bare repository of ours.

        Nobody else may be at work in it. A lock that stays would stop every later command, and a
        half pack would stay for good: git never looks at it again.
        """
        for pattern in ("*.lock", "refs/**/*.lock", "objects/**/tmp_*", "fast_import_crash_*"):
            for left in self.path.glob(pattern):
                if left.is_file():
                    left.unlink(missing_ok=True)

    def run(
        self,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        pinned: Mapping[str, str] = _PINNED,
    ) -> str:
        """Run one git command and return its output, byte for byte, as text.

        Raises:
            GitError: Git is not there, or the command failed.
        """
        from git.exc import GitCommandError

        try:
            output: bytes = self._execute(
                arguments, env, pinned, strip_newline_in_stdout=False, stdout_as_string=False
            )
        except GitCommandError as error:
            raise self._refused(arguments[0], _words(error)) from error
        return output.decode("utf-8", "surrogateescape")

    @contextmanager
    def fed(
        self, *arguments: str, pinned: Mapping[str, str] = _PINNED
    ) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
        """Run one git command; yield its standard input and output, and wait for its end.

        Raises:
            GitError: Git is not there, or the command failed.
        """
        # The holder ends the process when it is collected, so it has to live as long.
        holder = self._execute(arguments, None, pinned, as_process=True, istream=subprocess.PIPE)
        process = holder.proc
        try:
            with suppress(BrokenPipeError):  # it has ended early, and says why
                yield process.stdin, process.stdout
        finally:
            with suppress(BrokenPipeError):
                process.stdin.close()
            said = process.stderr.read().decode("utf-8", "replace").strip()
            process.stdout.close()
            process.stderr.close()
            status = process.wait()
        if status:
            raise self._refused(arguments[0], said)

    def merge(self, ours: str, base: str, theirs: str, labels: Sequence[str]) -> tuple[str, int]:
        """Merge three texts of one file.

        Args:
            ours: The text that is changed.
            base: The text that `theirs` was made from.
            theirs: The text whose changes are taken over.
            labels: What the markers of a conflict call the three, in this order.

        Returns:
            The merged text, with markers (all three sides) where there is a conflict, and how many
            conflicts there are.
        """
        with tempfile.TemporaryDirectory() as folder:
            paths = [Path(folder, name) for name in ("ours", "base", "theirs")]
            words = ["merge-file", "--quiet", "--diff3"]
            for path, text, label in zip(paths, (ours, base, theirs), labels, strict=True):
                path.write_bytes(text.encode("utf-8", "surrogateescape"))
                words += ["-L", label]
            conflicts = 0
            try:
                self.run(*words, *map(os.fspath, paths))
            except GitError as error:
                # It exits with the number of conflicts, and beyond 127 where it could not merge.
                conflicts = int(getattr(error.__cause__, "status", 0) or 0)
                if not 0 < conflicts < 128:
                    raise
            return paths[0].read_bytes().decode("utf-8", "surrogateescape"), conflicts

    def _execute(
        self,
        arguments: Sequence[str],
        env: Mapping[str, str] | None,
        pinned: Mapping[str, str],
        **how: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        from git.cmd import Git
        from git.exc import GitCommandNotFound

        options = [word for key, value in pinned.items() for word in ("-c", f"{key}={value}")]
        for name in _FOREIGN:  # GitPython only adds to the environment
            os.environ.pop(name, None)
        fixed = {"LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
        try:
            return Git(self.path).execute(
                ["git", *options, *arguments], env={**fixed, **(env or {})}, **how
            )
        except GitCommandNotFound as error:
            raise GitError(
                "git is not installed",
                expected="git 2.30 or later on the PATH",
                next_step="install git, then run the same command",
            ) from error

    def _refused(self, command: str, words: str) -> GitError:
        return GitError(
            f"git {command} failed in {self.path}: {words}",
            expected="a repository that git can work in",
            next_step="do as git says, then run the same command",
        )

    def resolve(self, revision: str) -> str | None:
        """Return the commit that `revision` names, or None.

        Raises:
            GitError: Git is not there, or this is no repository, or not one that git trusts.
        """
        try:
            return self.run("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}").strip()
        except GitError as error:
            if getattr(error.__cause__, "status", None) == 1:
                return None
            raise

    def changes(self) -> list[str]:
        """Return git's short status lines; empty when the checkout is clean."""
        pinned = {key: value for key, value in _PINNED.items() if key not in _OF_A_CHECKOUT}
        return self.run("status", "--porcelain", pinned=pinned).splitlines()

    def read(self, revision: str, path: str) -> str | None:
        """Return the text of `path` at `revision`, or None where there is no such file."""
        if not self.run("ls-tree", revision, "--", path):
            return None
        return self.run("cat-file", "blob", f"{revision}:{path}")

    @contextmanager
    def blobs(self) -> Iterator[Callable[[str], str]]:
        """Yield what returns the text of a blob, by one process of git for all."""
        with self.fed("cat-file", "--batch") as (stream, answers):

            def read(blob: str) -> str:
                stream.write(f"{blob}\n".encode())
                stream.flush()
                head = answers.readline().split()
                if len(head) != 3:
                    raise GitError(
                        f"{self.path} has no blob {blob}",
                        expected="an object of this repository",
                        next_step="run the same command again",
                    )
                return answers.read(int(head[2]) + 1)[:-1].decode("utf-8", "surrogateescape")

            yield read

    def commit(
        self, parent: str, files: Mapping[str, bytes], message: str, *, author: str, date: str
    ) -> str:
        """Store one commit, as `committing` does; return it."""
        with self.committing(author, date) as store:
            return store(parent, files, message)

    @contextmanager
    def committing(
        self, author: str, date: str
    ) -> Iterator[Callable[[str, Mapping[str, bytes], str], str]]:
        """Store commits by one process of git; touch no branch and no checkout.

        What is yielded stores one. It takes the revision or the new commit that it follows, new
        content by path (other files stay as they are, and a file that exists keeps its mode), and
        the whole message, and returns the commit. That is there for others when all are stored.

        Args:
            author: `Name <address>`, also the committer.
            date: ISO 8601 time for author and committer: same input, same commit id.
        """
        when = datetime.datetime.fromisoformat(date)
        who = f"{author} {when.timestamp():.0f} {when:%z}"
        numbers = itertools.count(1)  # the same commit may be stored twice
        marks: dict[str, str] = {}  # of what nobody else can find yet
        # From a pack, which it would leave of many, a bundle takes worse differences than it makes.
        loose = _PINNED | {"fastimport.unpackLimit": "1000000"}
        with self.fed("fast-import", "--quiet", "--done", pinned=loose) as (stream, answers):

            def store(parent: str, files: Mapping[str, bytes], message: str) -> str:
                mark = f":{next(numbers)}"
                stream.write(f"commit {_NO_BRANCH}\nmark {mark}\nauthor {who}\n".encode())
                stream.write(f"committer {who}\n".encode() + import_data(message.encode()))
                stream.write(f"from {marks.get(parent, parent)}\n".encode())
                for path, content in files.items():
                    name = _quoted(path)
                    there = ask(b"ls %s\n" % name)
                    mode = b"100644" if there.startswith(b"missing") else there[:6]
                    stream.write(b"M %s inline %s\n" % (mode, name) + import_data(content))
                commit = ask(f"\nget-mark {mark}\n".encode()).decode().strip()
                marks[commit] = mark
                return commit

            def ask(question: bytes) -> bytes:
                stream.write(question)
                stream.flush()
                answer: bytes = answers.readline()
                if not answer:
                    raise BrokenPipeError  # `fed` knows why
                return answer

            try:
                yield store
            finally:
                # The name that git wants for what it stores is to name nothing afterwards.
                stream.write(f"reset {_NO_BRANCH}\nfrom {'0' * 40}\n\ndone\n".encode())


_NO_BRANCH = "refs/kvfix/stored"


def import_data(content: bytes) -> bytes:
    """Return a message or a file's content as `git fast-import` reads it."""
    return b"data %d\n%s\n" % (len(content), content)


def _quoted(path: str) -> bytes:
    """Return a path as `git fast-import` reads it."""
    for plain, quoted in (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n")):
        path = path.replace(plain, quoted)
    return b'"%s"' % path.encode("utf-8", "surrogateescape")


def _words(error: GitCommandError) -> str:
    """Return what git said, without what GitPython puts around it: a name, and quotes."""
    said = (error.stderr or error.stdout or "").strip()
    for name in ("stderr: ", "stdout: "):
        said = said.removeprefix(name)
    # One pair: what git says may end with a quote of its own, of a path to type.
    return said.removeprefix("'").removesuffix("'").strip()


def identity(author: str, date: str) -> dict[str, str]:
    """Return the variables that make `author` (`Name <address>`) author and committer at `date`."""
    name, _, address = author.partition(" <")
    who = {"NAME": name, "EMAIL": address.rstrip(">"), "DATE": date}
    return {f"GIT_{role}_{key}": v for role in ("AUTHOR", "COMMITTER") for key, v in who.items()}

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scripts.commits.patches import patch_text
from scripts.system.errors import GitError
from scripts.system.git import Repository, identity
from tests.scripts.repos import commit, git

AUTHOR = "A Person <a@example.org>"
DATE = "2026-01-01T00:00:00+00:00"
BEFORE = "class A:\n" + "".join(f"    def f{n}():\n        return {n}\n\n" for n in range(40))
AFTER = BEFORE.replace("return 1", "return x").replace("    def f22", "    @x\n    def f22")

# What a person may have set, and what would show in a commit or a patch.
HOSTILE = """\
[am]
    threeWay = true
[apply]
    whitespace = fix
[color]
    ui = always
[commit]
    gpgSign = true
    cleanup = scissors
[core]
    abbrev = 40
    attributesFile = {folder}/attributes
    autocrlf = true
    hooksPath = {folder}/hooks
    quotePath = false
[diff]
    algorithm = patience
    context = 7
    interHunkContext = 30
    mnemonicPrefix = true
    noprefix = true
    renames = copies
    suppressBlankEmpty = true
    statGraphWidth = 5
[format]
    attach = true
    cc = boss@example.org
    coverLetter = true
    from = true
    headers = "Organization: Example\\n"
    noprefix = true
    notes = true
    numbered = true
    pretty = oneline
    signOff = true
    signature = me
    subjectPrefix = RFC
    thread = deep
    to = list@example.org
    useAutoBase = true
[gpg]
    program = {folder}/gpg
[i18n]
    commitEncoding = latin1
    logOutputEncoding = latin1
[log]
    showSignature = true
[status]
    showUntrackedFiles = no
[tag]
    gpgSign = true
[user]
    name = Somebody Else
    email = else@example.org
"""


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set all that a user may have set."""
    folder = tmp_path / "settings"
    (folder / "hooks").mkdir(parents=True)
    for name in ("pre-commit", "commit-msg", "reference-transaction", "post-checkout"):
        (folder / "hooks" / name).write_text("#!/bin/sh\nexit 1\n")
        (folder / "hooks" / name).chmod(0o755)
    (folder / "gpg").write_text("#!/bin/sh\necho gpg: no >&2\nexit 1\n")
    (folder / "gpg").chmod(0o755)
    (folder / "attributes").write_text("*.py diff=python text eol=crlf\n")
    (folder / "config").write_text(HOSTILE.format(folder=folder))
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(folder / "config"))
    elsewhere = tmp_path / "elsewhere"
    commit(elsewhere, {"other.py": "other\n"})
    monkeypatch.setenv("GIT_DIR", str(elsewhere / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(elsewhere))
    monkeypatch.setenv("GIT_INDEX_FILE", str(elsewhere / ".git" / "index"))
    monkeypatch.setenv("GIT_DIFF_OPTS", "--unified=9")
    monkeypatch.setenv("GIT_AUTHOR_NAME", "Nobody")


def exported(folder: Path) -> str:
    """Return the text of a patch made in a new repository in `folder`."""
    repository = Repository.init(folder)
    (folder / "a.py").write_text(BEFORE)
    (folder / "b.py").write_bytes(b"a\r\n")
    repository.run("add", "--all")
    who = {"GIT_AUTHOR_NAME": "A", "GIT_AUTHOR_EMAIL": "a@b", "GIT_AUTHOR_DATE": DATE}
    who |= {key.replace("AUTHOR", "COMMITTER"): value for key, value in who.items()}
    repository.run("commit", "--quiet", "-m", "before", env=who)
    repository.run("tag", "v1")
    message = "[kvfix 1] größer → kleiner\n\nWörter.\n\nFix: 1\n"
    files = {"a.py": AFTER.encode(), "b.py": b"b\r\n"}
    new = repository.commit("HEAD", files, message, author=AUTHOR, date=DATE)
    repository.run("notes", "add", "-m", "a note", new, env=who)
    return patch_text(repository, new)


def test_settings_do_not_reach_a_patch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    plain = exported(tmp_path / "plain")
    assert "return x" in plain
    assert "größer" not in plain.partition("\n\n")[0]  # encoded as mail asks for
    request.getfixturevalue("hostile")
    assert exported(tmp_path / "set") == plain


def test_settings_do_not_reach_a_commit(tmp_path: Path, hostile: None) -> None:
    repository = Repository.init(tmp_path / "it")
    commit(tmp_path / "it", {"a.py": BEFORE})
    new = repository.commit("HEAD", {"a.py": b"a\r\n"}, "m\n", author=AUTHOR, date=DATE)
    assert repository.run("cat-file", "blob", f"{new}:a.py") == "a\r\n"
    assert repository.run("show", "-s", "--format=%an|%ae|%cn|%cI|%B", new) == (
        "A Person|a@example.org|A Person|2026-01-01T00:00:00+00:00|m\n\n"
    )
    assert repository.changes() == []
    (tmp_path / "it" / "new").touch()
    assert repository.changes() == ["?? new"]


class TestCommit:
    def test_touches_no_branch_and_no_checkout(self, tmp_path: Path) -> None:
        commit(tmp_path, {"a.py": "a\n", "b/c.py": "c\n"})
        before = git(tmp_path, "for-each-ref"), git(tmp_path, "status", "--porcelain")
        repository = Repository(tmp_path)
        files = {"a.py": b"A\n", "d/e.py": b"e\n"}
        new = repository.commit("HEAD", files, "m\n", author=AUTHOR, date=DATE)
        assert (git(tmp_path, "for-each-ref"), git(tmp_path, "status", "--porcelain")) == before
        assert (tmp_path / "a.py").read_text() == "a\n"
        assert git(tmp_path, "diff", "--name-status", "HEAD", new) == "M\ta.py\nA\td/e.py\n"
        assert repository.read(new, "d/e.py") == "e\n"
        assert repository.read(new, "b/c.py") == "c\n"
        assert repository.read("HEAD", "d/e.py") is None

    def test_is_the_same_for_the_same_input(self, tmp_path: Path) -> None:
        ids = set()
        for name in ("one", "two"):
            commit(tmp_path / name, {"a.py": "a\n"})
            repository = Repository(tmp_path / name)
            ids.add(repository.commit("HEAD", {"a.py": b""}, "m\n", author=AUTHOR, date=DATE))
        assert len(ids) == 1

    def test_keeps_the_mode_of_a_file(self, tmp_path: Path) -> None:
        commit(tmp_path, {"a.py": "a\n"})
        (tmp_path / "a.py").chmod(0o755)
        commit(tmp_path, {})
        repository = Repository(tmp_path)
        files = {"a.py": b"A\n", "new.py": b""}
        new = repository.commit("HEAD", files, "m\n", author=AUTHOR, date=DATE)
        modes = [row.split()[0] for row in git(tmp_path, "ls-tree", new).splitlines()]
        assert modes == ["100755", "100644"]

    @pytest.mark.parametrize("path", ["ü b.py", 'a"b\\c.py', "a\nb.py", "d/e/f.py"])
    def test_takes_any_name(self, tmp_path: Path, path: str) -> None:
        commit(tmp_path, {"a.py": "a\n"})
        repository = Repository(tmp_path)
        new = repository.commit("HEAD", {path: b"\n"}, "m\n", author=AUTHOR, date=DATE)
        assert git(tmp_path, "diff", "-z", "--name-only", "HEAD", new) == f"{path}\0"

    def test_follows_one_that_is_as_new(self, tmp_path: Path) -> None:
        commit(tmp_path, {"a.py": "a\n"})
        repository = Repository(tmp_path)
        with repository.committing(AUTHOR, DATE) as store:
            one = store("HEAD", {"b.py": b"b\n"}, "one\n")
            assert store("HEAD", {"b.py": b"b\n"}, "one\n") == one
            two = store(one, {"b.py": b"B\n"}, "two\n")
            three = store(one, {"c.py": b""}, "three\n")
            other = store("HEAD", {"c.py": b""}, "other\n")
        assert two == repository.commit(one, {"b.py": b"B\n"}, "two\n", author=AUTHOR, date=DATE)
        parents = git(tmp_path, "log", "--no-walk=unsorted", "--format=%P", two, three, one, other)
        head = git(tmp_path, "rev-parse", "HEAD").strip()
        assert parents.split() == [one, one, head, head]

    def test_leaves_nothing_where_the_next_one_fails(self, tmp_path: Path) -> None:
        commit(tmp_path, {"a.py": "a\n"})
        before = git(tmp_path, "for-each-ref"), sorted((tmp_path / ".git").iterdir())
        with (
            pytest.raises(ZeroDivisionError),
            Repository(tmp_path).committing(AUTHOR, DATE) as store,
        ):
            store("HEAD", {"a.py": b"A\n"}, "m\n")
            raise ZeroDivisionError
        assert (git(tmp_path, "for-each-ref"), sorted((tmp_path / ".git").iterdir())) == before

    def test_needs_a_commit_to_follow(self, tmp_path: Path) -> None:
        commit(tmp_path, {"a.py": "a\n"})
        with pytest.raises(GitError, match=r"fast-import failed.*nobody"):
            Repository(tmp_path).commit("nobody", {"a.py": b""}, "m\n", author=AUTHOR, date=DATE)

    def test_keeps_bytes_that_are_no_text(self, tmp_path: Path) -> None:
        commit(tmp_path, {"a.py": b"\xff\n\r\n"})
        text = Repository(tmp_path).read("HEAD", "a.py")
        assert text is not None
        assert text.encode("utf-8", "surrogateescape") == b"\xff\n\r\n"


class TestResolve:
    def test_finds_commits_only(self, tmp_path: Path) -> None:
        new = commit(tmp_path, {"a.py": "a\n"})
        git(tmp_path, "tag", "v1")
        repository = Repository(tmp_path)
        assert [repository.resolve(name) for name in ("HEAD", "v1", "main")] == [new] * 3
        assert repository.resolve("v2") is None
        assert repository.resolve("HEAD:a.py") is None

    def test_knows_a_repository_without_commits(self, tmp_path: Path) -> None:
        assert Repository.init(tmp_path).resolve("HEAD") is None

    def test_says_why_git_refuses(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
        with pytest.raises(GitError, match="not a git repository"):
            Repository(tmp_path).resolve("HEAD")


def test_without_git_the_user_learns_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(GitError, match="git is not installed") as caught:
        Repository(tmp_path).run("status")
    assert "install git" in caught.value.next_step


def test_the_words_of_git_are_in_the_message(tmp_path: Path) -> None:
    commit(tmp_path, {"a.py": "a\n"})
    with pytest.raises(GitError, match=r"git tag failed in .*: fatal: .*'no such'") as caught:
        Repository(tmp_path).run("tag", "no such")
    assert "as git says" in caught.value.next_step


@pytest.mark.parametrize("path", ["/plain", "'/with a space'", "''twice''"])
def test_the_quotes_of_git_stay(tmp_path: Path, path: str) -> None:
    commit(tmp_path, {"a.py": "a\n"})
    with pytest.raises(GitError) as caught:
        Repository(tmp_path).run("log", f"--no-such={path}")
    assert caught.value.found.endswith(f": fatal: unrecognized argument: --no-such={path}")


def test_what_git_says_on_its_output_is_in_the_message_too(tmp_path: Path) -> None:
    commit(tmp_path, {"a.py": "a\n"})
    with pytest.raises(GitError, match=r": On branch main\nnothing to commit.* clean$"):
        Repository(tmp_path).run("commit", "-m", "m", env=identity(AUTHOR, DATE))


def test_what_killed_commands_have_left_is_swept_and_nothing_else(tmp_path: Path) -> None:
    commit(tmp_path / "a", {"a.py": "a\n"}, "before")
    git(tmp_path, "clone", "--quiet", "--bare", "a", "b.git")
    bare = tmp_path / "b.git"
    before = set(bare.rglob("*"))
    left = ["objects/pack/tmp_pack_x", "objects/pack/tmp_idx_x", "objects/tmp_obj_x",
            "refs/heads/main.lock", "packed-refs.lock", "fast_import_crash_1"]  # fmt: skip
    for name in left:
        (bare / name).touch()
    Repository(bare).sweep()
    assert set(bare.rglob("*")) == before
    git(bare, "fsck", "--strict")

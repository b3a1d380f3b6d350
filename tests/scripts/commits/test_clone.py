from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.commits import clone as module
from scripts.commits.clone import apply_to_tree
from scripts.patchset.patch import Offset
from scripts.system.errors import (
    AlreadyPatchedError,
    DirtyTreeError,
    GitError,
    KvfixError,
    PatchDoesNotApplyError,
    TouchedFileDiffersError,
    UsageError,
    WrongReleaseError,
)
from scripts.system.process import run
from tests.scripts import toys
from tests.scripts.repos import commit, git, write
from tests.scripts.system.test_git import hostile as hostile  # a fixture

BRANCH = "kvfix/v0.20.2"


def snapshot(folder: Path) -> tuple[str, ...]:
    """Return all of a repository that a user can see."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and ".git" not in p.parts)
    return (
        git(folder, "for-each-ref"),
        git(folder, "symbolic-ref", "--quiet", "HEAD", check=False),
        git(folder, "rev-parse", "HEAD", check=False),
        git(folder, "status", "--porcelain", "--untracked-files=all"),
        git(folder, "config", "--list", "--local"),
        *(f"{path} {path.stat().st_mtime_ns} {path.read_bytes()!r}" for path in files),
    )


def applied(folder: Path, tmp_path: Path) -> list[Offset]:
    """Apply the small series and return the offsets."""
    patches = toys.series(tmp_path).patches
    return apply_to_tree(folder, BRANCH, "0.20.2", patches, toys.REGISTRY)


def refused(folder: Path, tmp_path: Path, kind: type[KvfixError]) -> KvfixError:
    """Apply the small series, which is refused and leaves everything as it was."""
    patches = toys.series(tmp_path).patches
    before = snapshot(folder)
    with pytest.raises(kind) as caught:
        apply_to_tree(folder, BRANCH, "0.20.2", patches, toys.REGISTRY)
    assert snapshot(folder) == before
    return caught.value


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    return toys.clone_of_vllm(tmp_path / "vllm")


class TestBranch:
    def test_has_a_commit_for_each_fix(self, clone: Path, tmp_path: Path) -> None:
        assert applied(clone, tmp_path) == []
        log = git(clone, "log", "--format=%an <%ae>|%s", f"v0.20.2..{BRANCH}").splitlines()
        assert log == [
            f"{toys.AUTHOR}|[kvfix 2] 2 is right → for good",
            f"{toys.AUTHOR}|[kvfix 1] 1 is right → for good",
        ]
        assert git(clone, "merge-base", BRANCH, "v0.20.2") == git(clone, "rev-parse", "v0.20.2")
        body = git(clone, "show", "-s", "--format=%B", f"{BRANCH}~")
        assert body.rstrip("\n") + "\n" == toys.REGISTRY.message(toys.REGISTRY.fixes["1"])

    def test_leaves_the_checkout_alone(self, clone: Path, tmp_path: Path) -> None:
        before = snapshot(clone)
        applied(clone, tmp_path)
        after = snapshot(clone)
        assert after[1:] == before[1:]
        new = [row for row in after[0].splitlines() if row not in before[0]]
        assert [row.split()[-1] for row in new] == [f"refs/heads/{BRANCH}"]

    def test_holds_hooks_notices_overlay_and_provenance(self, clone: Path, tmp_path: Path) -> None:
        applied(clone, tmp_path)
        first = git(clone, "diff", "--name-only", "v0.20.2", f"{BRANCH}~").splitlines()
        assert first == [
            "vllm/distributed/state.py",
            "vllm/worker.py",
            "vllm_overlay/__init__.py",
            "vllm_overlay/__main__.py",
            "vllm_overlay/distributed/__init__.py",
            "vllm_overlay/distributed/kv_transfer/__init__.py",
            "vllm_overlay/distributed/kv_transfer/kv_transfer_state.py",
            "vllm_overlay/provenance/__init__.py",
            "vllm_overlay/provenance/fix_1.py",
        ]
        second = git(clone, "diff", "--name-only", f"{BRANCH}~", BRANCH).splitlines()
        assert second == ["vllm/worker.py", "vllm_overlay/provenance/fix_2.py"]
        worker = git(clone, "show", f"{BRANCH}:vllm/worker.py")
        assert worker.splitlines()[2].endswith("(Apache-2.0, section 4(b)): 1, 2")
        assert worker.count("vllm-kvfix") == 1
        plain = "".join(row for row in worker.splitlines(True) if "vllm-kvfix" not in row)
        both = (
            ("    return x + 2\n", "    return work1(x)\n"),
            ("    return x + 9\n", "    return work1(x)\n"),
        )
        assert plain == toys.changed(toys.WORKER, *both)
        state = git(clone, "show", f"{BRANCH}:vllm/distributed/state.py")
        assert state.splitlines()[0].endswith("(Apache-2.0, section 4(b)): 1")

    def test_can_be_checked_out_and_tells_what_it_holds(self, clone: Path, tmp_path: Path) -> None:
        applied(clone, tmp_path)
        git(clone, "switch", "--quiet", BRANCH)
        result = run([sys.executable, "-m", "vllm_overlay"], cwd=clone, env={"PYTHONPATH": ""})
        assert "1    vllm-project/vllm#1  1 is right → for good" in result.stdout
        assert "2    -                    2 is right → for good" in result.stdout

    def test_has_the_same_ids_in_another_clone(self, clone: Path, tmp_path: Path) -> None:
        git(tmp_path, "clone", "--quiet", str(clone), "another")
        for name, folder in (("one", clone), ("two", tmp_path / "another")):
            (tmp_path / name).mkdir()
            applied(folder, tmp_path / name)
        assert git(clone, "rev-parse", BRANCH) == git(tmp_path / "another", "rev-parse", BRANCH)

    def test_keeps_the_mode_of_a_file(self, clone: Path, tmp_path: Path) -> None:
        (clone / toys.WORKER).chmod(0o755)
        commit(clone, {}, "executable")
        applied(clone, tmp_path)
        assert git(clone, "ls-tree", BRANCH, toys.WORKER).startswith("100755")


class TestFork:
    def test_with_lines_above_gets_the_hooks_where_they_belong(
        self, clone: Path, tmp_path: Path
    ) -> None:
        text = toys.changed(toys.WORKER, ("import os\n", "import os\nimport re\nimport json\n"))
        commit(clone, {toys.WORKER: text, "ours.txt": "ours\n"}, "the fork's own work")
        assert applied(clone, tmp_path) == [
            Offset("1-a-name/0.20.2.patch", toys.WORKER, 1, 2),
            Offset("2-a-name/0.20.2.patch", toys.WORKER, 1, 2),
        ]
        worker = git(clone, "show", f"{BRANCH}:{toys.WORKER}")
        assert "import json" in worker
        assert "def work2(x):\n    return work1(x)\n" in worker
        assert "def work9(x):\n    return work1(x)\n" in worker
        assert git(clone, "show", f"{BRANCH}:ours.txt") == "ours\n"

    def test_may_edit_what_lies_beyond_the_context(self, clone: Path, tmp_path: Path) -> None:
        text = toys.changed(toys.WORKER, ("def work8(x):\n", "def work8(x):  # ours\n"))
        commit(clone, {toys.WORKER: text}, "the fork's own work")
        assert applied(clone, tmp_path) == []

    @pytest.mark.parametrize("changed", ["def work9(x):", "    return x + 9", "def work10(x):"])
    def test_that_edits_the_same_place_is_refused(
        self, clone: Path, tmp_path: Path, changed: str
    ) -> None:
        text = toys.changed(toys.WORKER, (changed + "\n", changed + "  # ours\n"))
        commit(clone, {toys.WORKER: text}, "the fork's own work")
        error = refused(clone, tmp_path, PatchDoesNotApplyError)
        assert f"2-a-name/0.20.2.patch, {toys.WORKER}, hunk 1" in error.found
        assert f"wanted: '{changed}\\n'" in error.found
        assert f"found:  '{changed}  # ours\\n'" in error.found

    def test_that_removed_a_file_is_refused(self, clone: Path, tmp_path: Path) -> None:
        commit(clone, {toys.STATE: None}, "the fork's own work")
        assert toys.STATE in refused(clone, tmp_path, TouchedFileDiffersError).found

    def test_with_tags_of_its_own_is_welcome(self, clone: Path, tmp_path: Path) -> None:
        commit(clone, {"ours.txt": "ours\n"}, "the fork's own work")
        git(clone, "tag", "v1.0")
        git(clone, "tag", "v0.20.2.post7")
        applied(clone, tmp_path)

    def test_without_any_tag_is_judged_by_its_text(
        self, clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "read_source", lambda _, path: toys.FILES[path])
        git(tmp_path, "clone", "--quiet", "--no-tags", "--depth=1", clone.as_uri(), "shallow")
        applied(tmp_path / "shallow", tmp_path)


class TestRefusal:
    @pytest.mark.parametrize("tag", ["v0.20.1", "v0.21.0"])
    def test_of_another_release(self, clone: Path, tmp_path: Path, tag: str) -> None:
        git(clone, "switch", "--quiet", "--detach", tag)
        error = refused(clone, tmp_path, WrongReleaseError)
        assert f"is on top of {tag}" in error.found
        assert "switch --detach v0.20.2" in error.next_step

    def test_of_another_release_where_the_right_tag_is_not_known(
        self, clone: Path, tmp_path: Path
    ) -> None:
        git(clone, "switch", "--quiet", "--detach", "v0.20.1")
        git(clone, "tag", "--delete", "v0.20.2")
        error = refused(clone, tmp_path, WrongReleaseError)
        assert "/vllm-project/vllm tag v0.20.2; git -C" in error.next_step

    def test_of_a_history_that_never_was_the_release(self, clone: Path, tmp_path: Path) -> None:
        git(clone, "switch", "--quiet", "--orphan", "alone")
        commit(clone, toys.FILES, "imported")
        assert "does not descend" in refused(clone, tmp_path, WrongReleaseError).found

    @pytest.mark.parametrize(
        "spoil",
        [
            lambda clone: write(clone, {toys.WORKER: "changed\n"}),
            lambda clone: write(clone, {"vllm/new.py": "new\n"}),
            lambda clone: (clone / toys.WORKER).unlink(),
            lambda clone: git(clone, "rm", "--quiet", toys.WORKER),
        ],
        ids=["changed", "untracked", "removed", "staged"],
    )
    def test_of_a_dirty_tree(
        self, clone: Path, tmp_path: Path, spoil: Callable[[Path], object]
    ) -> None:
        spoil(clone)
        error = refused(clone, tmp_path, DirtyTreeError)
        assert "1 uncommitted change" in error.found
        assert "stash --include-untracked" in error.next_step
        git(clone, *error.next_step.split()[3:])
        (tmp_path / "again").mkdir()
        applied(clone, tmp_path / "again")

    def test_of_a_branch_that_exists(self, clone: Path, tmp_path: Path) -> None:
        git(clone, "branch", BRANCH)
        error = refused(clone, tmp_path, DirtyTreeError)
        git(clone, *error.next_step.split()[3:])
        (tmp_path / "again").mkdir()
        applied(clone, tmp_path / "again")

    def test_of_a_tree_that_is_patched(self, clone: Path, tmp_path: Path) -> None:
        applied(clone, tmp_path)
        git(clone, "switch", "--quiet", BRANCH)
        git(clone, "branch", "-m", "mine")
        (tmp_path / "again").mkdir()
        error = refused(clone, tmp_path / "again", AlreadyPatchedError)
        assert "vllm_overlay" in error.found

    def test_of_what_is_no_clone_of_vllm(self, clone: Path, tmp_path: Path) -> None:
        patches = toys.series(tmp_path).patches
        plain, other, empty = tmp_path / "plain", tmp_path / "other", tmp_path / "empty"
        write(plain, toys.FILES)
        commit(other, {"a": "a\n"})
        empty.mkdir()
        git(empty, "init", "--quiet")
        inside = tmp_path / "whole"
        commit(inside, {f"vendored/{name}": text for name, text in toys.FILES.items()})
        for folder in (
            plain, other, empty, inside / "vendored", clone / "vllm", tmp_path / "missing",
            clone / toys.WORKER,
        ):  # fmt: skip
            with pytest.raises(UsageError, match="is no git checkout of vLLM") as caught:
                apply_to_tree(folder, BRANCH, "0.20.2", patches, toys.REGISTRY)
            assert str(folder) in caught.value.found
            assert "clone vLLM" in caught.value.next_step

    def test_of_a_repository_that_git_does_not_read(self, clone: Path, tmp_path: Path) -> None:
        (clone / ".git" / "HEAD").unlink()
        with pytest.raises(GitError, match="not a git repository"):
            apply_to_tree(clone, BRANCH, "0.20.2", toys.series(tmp_path).patches, toys.REGISTRY)


class TestSettings:
    def test_of_the_user_change_nothing(
        self, clone: Path, tmp_path: Path, request: pytest.FixtureRequest
    ) -> None:
        commit(clone, {"ours.txt": "ours\n"}, "the fork's own work")
        self.sign(clone)
        git(tmp_path, "clone", "--quiet", str(clone), "another")
        (tmp_path / "one").mkdir()
        applied(clone, tmp_path / "one")
        patches = toys.series(tmp_path).patches
        request.getfixturevalue("hostile")
        another = tmp_path / "another"
        assert apply_to_tree(another, BRANCH, "0.20.2", patches, toys.REGISTRY) == []
        assert git(another, "rev-parse", BRANCH) == git(clone, "rev-parse", BRANCH)

    @staticmethod
    def sign(clone: Path) -> None:
        """Put a signature on HEAD, which `log.showSignature` has git check and talk about."""
        head, _, message = git(clone, "cat-file", "commit", "HEAD").partition("\n\n")
        signature = "gpgsig -----BEGIN PGP SIGNATURE-----\n \n abc\n -----END PGP SIGNATURE-----"
        (clone.parent / "signed").write_text(f"{head}\n{signature}\n\n{message}")
        signed = git(clone, "hash-object", "-t", "commit", "-w", str(clone.parent / "signed"))
        git(clone, "reset", "--quiet", "--hard", signed.strip())

    def test_of_a_checkout_say_how_its_files_lie_on_disk(
        self, clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Files end in \r\n there, and their modes mean nothing: that is no change.
        another = tmp_path / "another"
        git(tmp_path, "clone", "--quiet", "--config", "core.autocrlf=true",
            "--config", "core.fileMode=false", str(clone), "another")  # fmt: skip
        assert b"\r\n" in (another / toys.WORKER).read_bytes()
        (another / toys.WORKER).chmod(0o755)
        for path in (another / "vllm").rglob("*.py"):
            path.write_bytes(path.read_bytes())  # git has to read it again
        (tmp_path / "one").mkdir()
        applied(clone, tmp_path / "one")
        assert applied(another, tmp_path) == []
        assert git(another, "rev-parse", BRANCH) == git(clone, "rev-parse", BRANCH)

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.commits import patches
from scripts.commits.patches import commit_hooks, patch_text, release_repository
from scripts.patchset.patch import Patch
from scripts.system.errors import PatchDoesNotApplyError
from scripts.system.git import Repository
from tests.scripts import toys
from tests.scripts.repos import git, write
from tests.scripts.system.test_git import hostile as hostile  # a fixture


@pytest.fixture(autouse=True)
def release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the small vLLM in place of all releases."""
    folder = tmp_path / "release"
    write(folder, {**toys.FILES, ".gitignore": "*.py\n", "vllm/notes.tmp": "\r\n"})
    monkeypatch.setattr(patches, "release_tree", lambda release: folder)
    return folder


def exported(folder: Path, patches: tuple[Patch, ...]) -> list[str]:
    """Return the texts of `patches` as they are exported from a repository in `folder`."""
    repository = release_repository("0.20.2", folder, toys.REGISTRY)
    commits = commit_hooks(repository, "HEAD", patches, toys.REGISTRY)
    return [patch_text(repository, commit) for commit in commits]


def test_a_release_is_one_commit_with_all_its_files(tmp_path: Path, release: Path) -> None:
    folder = tmp_path / "repository"
    release_repository("0.20.2", folder, toys.REGISTRY)
    assert git(folder, "log", "--format=%an|%cI|%s|%D") == (
        "kvfix maintainers|2026-01-01T00:00:00+00:00|vLLM 0.20.2|HEAD -> main, tag: v0.20.2\n"
    )
    files = {str(p.relative_to(release)) for p in release.rglob("vllm/**/*") if p.is_file()}
    assert set(git(folder, "ls-files").splitlines()) == files
    assert git(folder, "status", "--porcelain") == ""
    assert git(folder, "show", "HEAD:vllm/notes.tmp") == "\r\n"


def test_settings_and_folders_leave_no_trace(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    patches = toys.series(tmp_path).patches
    first = exported(tmp_path / "a", patches)
    request.getfixturevalue("hostile")
    assert exported(tmp_path / "b", patches) == first
    for text in first:
        assert text.startswith(f"From {'0' * 40} Mon Sep 17 00:00:00 2001\n")
        assert "\nDate: Thu, 1 Jan 2026 00:00:00 +0000\n" in text
        assert str(tmp_path) not in text
        assert "\n---\n vllm/" in text  # or no program reads the trailers
        assert "\n-- \n" not in text


def test_what_is_exported_git_can_apply(tmp_path: Path) -> None:
    texts = exported(tmp_path / "a", toys.series(tmp_path).patches)
    folder = tmp_path / "b"
    release_repository("0.20.2", folder, toys.REGISTRY)
    for number, text in enumerate(texts):
        path = tmp_path / f"{number}.patch"
        path.write_bytes(text.encode())
        git(folder, "am", "--quiet", "--keep-non-patch", str(path))
    log = git(folder, "log", "--format=%B%x00", "v0.20.2..").split("\0")
    messages = [entry.strip("\n") + "\n" for entry in log if entry.strip()]
    expected = [toys.REGISTRY.message(fix) for fix in toys.REGISTRY.fixes.values()]
    assert messages == expected[::-1]
    one = Repository(folder).read("HEAD", toys.STATE)
    assert one == toys.ONE[toys.STATE]


def test_hooks_that_have_no_place_are_refused(tmp_path: Path, release: Path) -> None:
    patches = toys.series(tmp_path).patches
    (release / toys.WORKER).write_text("nothing\n")
    with pytest.raises(PatchDoesNotApplyError, match=toys.WORKER):
        exported(tmp_path / "a", patches)
    (release / toys.WORKER).unlink()
    with pytest.raises(PatchDoesNotApplyError, match=toys.WORKER):
        exported(tmp_path / "b", patches)

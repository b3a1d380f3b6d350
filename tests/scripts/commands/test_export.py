"""`nox -s export`: what it writes, taken into other repositories with git as it comes."""

from __future__ import annotations

import os
import shutil
from functools import cache
from pathlib import Path

import pytest

from scripts.commits.bundle import write_export
from scripts.patchset.overlay import overlay_files, provenance, stamp_all
from scripts.patchset.patch import apply_patches
from scripts.patchset.registry import load_registry
from scripts.patchset.series import load_series
from scripts.project import project
from scripts.system.files import only_process
from scripts.upstream.tree import read_source, release_tree
from tests.scripts import checkouts, toys
from tests.scripts.checkouts import Checkout
from tests.scripts.commands.test_apply import said_no
from tests.scripts.repos import commit, git, write
from tests.scripts.system.test_git import hostile as hostile  # a fixture

BRANCH = "kvfix/v0.20.2"
HOOK = f"{toys.HOOK.replace('.', '/')}.py"
NEWEST = ["0.18.1", "0.19.1", "0.20.2", "0.21.0", "0.22.1", "0.33.0"]  # of each minor release

series_of = cache(load_series)  # the test of each fix asks for it anew


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """Return a copy of the tools with a small series, and its release in the cache."""
    checkout = checkouts.small(tmp_path_factory.mktemp("made"))
    (checkout.folder / HOOK).write_text("def _sync_engine_id_across_tp(x): ...\n")
    return checkout


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    return toys.clone_of_vllm(tmp_path / "vllm")


def contents(folder: Path) -> dict[str, bytes]:
    """Return all files below a folder."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def exported(checkout: Checkout, folder: Path, *words: str) -> Path:
    """Export the small release into `folder`."""
    done = checkout.run("export", "0.20.2", "--out", folder, *words)
    assert done.returncode == 0, done.stderr
    assert f"wrote {folder}" in done.stdout
    return folder


class TestFolder:
    def test_holds_mboxes_a_bundle_and_how_to_use_them(
        self, made: Checkout, tmp_path: Path
    ) -> None:
        files = contents(exported(made, tmp_path / "export"))
        assert sorted(files) == [
            "README.md",
            "alone/1-a-name.mbox",
            "alone/2-a-name.mbox",
            "kvfix-v0.20.2.bundle",
            "series/0001-1-a-name.patch",
            "series/0002-2-a-name.patch",
        ]
        assert files["alone/1-a-name.mbox"] == files["series/0001-1-a-name.patch"]
        assert (
            b"| 2 | 2 is right \xe2\x86\x92 for good | 1 | kvfix/v0.20.2-2 |" in files["README.md"]
        )
        assert b"+++ b/vllm_overlay/distributed/" in files["series/0001-1-a-name.patch"]

    def test_has_the_same_bytes_elsewhere_and_for_another_user(
        self, made: Checkout, tmp_path: Path, request: pytest.FixtureRequest
    ) -> None:
        one = contents(exported(made, tmp_path / "one"))
        request.getfixturevalue("hostile")
        assert contents(exported(made, tmp_path / "far" / "away" / "two")) == one

    def test_is_left_alone_where_it_says_the_same(self, made: Checkout, tmp_path: Path) -> None:
        folder = exported(made, tmp_path / "export")
        done = made.run("export", "--out", folder)
        assert (done.returncode, "nothing has changed" in done.stdout) == (0, True)

    def test_is_never_overwritten(self, made: Checkout, tmp_path: Path) -> None:
        folder = exported(made, tmp_path / "export")
        (folder / "README.md").write_text("mine\n")
        said_no(made.run("export", "--out", folder), 2, str(folder), f"rm -r {folder}")
        (folder / "mine").touch()
        result = made.run("export", "--out", folder)
        said_no(result, 2, str(folder), "--out")
        assert "rm" not in result.stderr, "it is not ours alone"
        assert (folder / "mine").exists()
        assert [path.name for path in tmp_path.iterdir()] == ["export"]

    def test_may_be_there_and_empty(self, made: Checkout, tmp_path: Path) -> None:
        (tmp_path / "export").mkdir()
        assert contents(exported(made, tmp_path / "export"))

    def test_may_be_named_from_where_one_stands(self, made: Checkout, tmp_path: Path) -> None:
        expected = contents(exported(made, tmp_path / "export"))
        assert contents(made.folder / exported(made, Path("dist", "relative"))) == expected

    def test_needs_git(self, made: Checkout, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        result = made.run("export", "--out", tmp_path / "it", PATH=str(tmp_path / "empty"))
        said_no(result, 22, "git is not installed", "install git")
        assert [path.name for path in tmp_path.iterdir()] == ["empty"]

    def test_cannot_be_a_file(self, made: Checkout, tmp_path: Path) -> None:
        (tmp_path / "it").write_text("mine\n")
        result = made.run("export", "--out", tmp_path / "it")
        said_no(result, 2, f"{tmp_path / 'it'} is a file", "--out")
        assert "a commit for each" not in result.stderr  # it is said before the work
        assert (tmp_path / "it").read_text() == "mine\n"

    def test_can_hold_some_fixes_only(self, made: Checkout, tmp_path: Path) -> None:
        files = contents(exported(made, tmp_path / "one", "--fix", "1"))
        assert b"Made by `nox -s export -- 0.20.2 --fix 1`." in files["README.md"]
        assert "series/0002-2-a-name.patch" not in files
        assert len(contents(exported(made, tmp_path / "two", "--fix", "2"))) == 6
        said_no(made.run("export", "--fix", "3"), 2, "has no fix 3", "some of 1, 2")

    def test_is_not_written_where_a_commit_could_not_be_imported(
        self, made: Checkout, tmp_path: Path
    ) -> None:
        broken = Checkout(shutil.copytree(made.folder, tmp_path / "kvfix"), made.cache)
        (broken.folder / HOOK).write_text(
            "from typing import TYPE_CHECKING\n"
            "from vllm.distributed import gone\n"
            "if TYPE_CHECKING:\n    from vllm.distributed import elsewhere\n"
            "def _sync_engine_id_across_tp(x): ...\n"
        )
        result = broken.run("export", "--out", tmp_path / "export")
        assert result.returncode == 30
        assert f"{HOOK}: no vllm.distributed.gone in this commit" in result.stderr
        assert "elsewhere" not in result.stderr  # only a type checker looks for that
        assert not (tmp_path / "export").exists()


class TestTaken:
    """With git as it is installed, into a clone with a history of its own."""

    def test_as_mboxes(self, made: Checkout, tmp_path: Path, clone: Path) -> None:
        folder = exported(made, tmp_path / "export")
        git(clone, "am", *sorted(str(path) for path in (folder / "series").iterdir()))
        series = git(clone, "rev-parse", "HEAD^{tree}")
        git(clone, "reset", "--quiet", "--hard", "v0.20.2")
        git(clone, "am", "--keep-non-patch", str(folder / "alone" / "2-a-name.mbox"))
        assert git(clone, "rev-parse", "HEAD^{tree}") == series  # of two, one depends on the other
        assert git(clone, "show", "-s", "--format=%s").startswith("[kvfix 2] ")

    def test_as_branches(self, made: Checkout, tmp_path: Path, clone: Path) -> None:
        folder = exported(made, tmp_path / "export")
        bundle = str(folder / "kvfix-v0.20.2.bundle")
        git(clone, "bundle", "verify", bundle)
        git(clone, "fetch", "--quiet", bundle, "refs/heads/*:refs/heads/*")
        assert git(clone, "branch", "--list", "kvfix/*", "--format=%(refname:short)").split() == [
            BRANCH, f"{BRANCH}-1", f"{BRANCH}-2", f"{BRANCH}-stock",
        ]  # fmt: skip
        git(clone, "cherry-pick", f"{BRANCH}-stock..{BRANCH}")
        expected = made.run("export", "--into", fresh := toys.clone_of_vllm(tmp_path / "fresh"))
        assert expected.returncode == 0
        assert git(clone, "rev-parse", "HEAD^{tree}") == git(
            fresh, "rev-parse", f"{BRANCH}^{{tree}}"
        )


class TestInto:
    def test_a_clone_makes_a_branch_and_says_what_to_type(
        self, made: Checkout, clone: Path
    ) -> None:
        result = made.run("export", "0.20.2", "--into", clone)
        assert (result.returncode, result.stderr) == (0, "")
        assert f"use it: git -C {clone} switch {BRANCH}" in result.stdout
        assert git(clone, "rev-list", "--count", f"v0.20.2..{BRANCH}") == "2\n"
        said_no(made.run("export", "--into", clone), 21, f"has a branch {BRANCH}")

    def test_reports_hunks_that_have_moved(self, made: Checkout, clone: Path) -> None:
        (clone / toys.WORKER).write_text("\n" * 5 + toys.FILES[toys.WORKER])
        git(clone, "commit", "--quiet", "--all", "-m", "ours")
        said = made.run("export", "0.20.2", "--into", clone).stdout
        assert f"1-a-name/0.20.2.patch: hunk 1 of {toys.WORKER} applied +5 lines away" in said

    def test_takes_some_fixes_only(self, made: Checkout, clone: Path) -> None:
        assert made.run("export", "--into", clone, "--fix", "1").returncode == 0
        assert git(clone, "rev-list", "--count", f"v0.20.2..{BRANCH}") == "1\n"

    def test_what_is_dirty_or_no_clone_is_refused(
        self, made: Checkout, clone: Path, tmp_path: Path
    ) -> None:
        (clone / "new").touch()
        said_no(made.run("export", "--into", clone), 21, "uncommitted", "stash")
        said_no(made.run("export", "--into", tmp_path), 2, "no git checkout of vLLM")

    def test_and_a_folder_exclude_each_other(self, made: Checkout, tmp_path: Path) -> None:
        result = made.run("export", "--into", tmp_path, "--out", tmp_path)
        assert (result.returncode, "not allowed with" in result.stderr) == (2, True)


def export_of(release: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the export of a real release, made by whichever of pytest's workers comes first."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder = shared / "exports" / release
    folder.parent.mkdir(exist_ok=True)
    with only_process(folder.parent, f"exports {release}"):
        if not folder.exists():
            assert write_export(release, load_series(release).patches, load_registry(), folder)
    return folder


@pytest.fixture(scope="module", params=NEWEST)
def fork(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a fork of a real release, with the branches of its export."""
    release: str = request.param
    folder = tmp_path_factory.mktemp(f"fork-{release}")
    git(folder, "init", "--quiet", "--initial-branch=main", "--template=")
    shutil.copytree(export_of(release, tmp_path_factory), folder / ".git" / "export")
    bundle = str(folder / ".git" / "export" / f"kvfix-v{release}.bundle")
    git(folder, "fetch", "--quiet", bundle, "refs/heads/kvfix/*:refs/heads/kvfix/*")
    # What no fix changes git would only look at, for each commit anew.
    for name in {name for patch in series_of(release).patches for name in patch.files}:
        write(folder, {name: (release_tree(release) / name).read_text(encoding="utf-8")})
    commit(folder, {"FORK.md": "a history of its own\n"}, release)
    git(folder, "tag", f"v{release}")
    return folder


@pytest.mark.parametrize("fix_id", ["", *load_registry().fixes], ids=lambda i: i or "all")
def test_each_fix_of_ours_can_be_taken_alone(fork: Path, fix_id: str) -> None:
    """What git makes of its commits is, byte for byte, what its patches make of the release."""
    release = (fork / ".git" / "export" / "README.md").read_text().split()[5].rstrip(",")
    assert release in project().releases
    registry, series = load_registry(), series_of(release)
    if fix_id and fix_id not in series.fix_ids:
        fix = registry.fixes[fix_id]  # or lint would have said so:
        assert fix.unpatched_on(release) or not fix.affects(release)
        return
    patches = series.only([fix_id], registry) if fix_id else series.patches
    texts, _ = apply_patches(patches, lambda path: read_source(release, path))
    expected = {path: text.encode() for path, text in stamp_all(texts, patches).items()}
    expected |= overlay_files(patches)
    expected |= dict(provenance(registry.fixes[patch.fix_id]) for patch in patches)

    branch = f"kvfix/v{release}" + (f"-{fix_id}" if fix_id else "")
    git(fork, "switch", "--quiet", "--detach", f"v{release}")
    git(fork, "cherry-pick", f"kvfix/v{release}-stock..{branch}")
    names = git(fork, "diff", "--name-only", f"v{release}", "HEAD").splitlines()
    assert {name: (fork / name).read_bytes() for name in names} == expected
    assert (fork / "FORK.md").is_file()
    picked = git(fork, "rev-parse", "HEAD^{tree}")

    git(fork, "switch", "--quiet", "--detach", f"v{release}")
    folder = fork / ".git" / "export"
    alone = (folder / "alone").glob(f"{fix_id}-*") if fix_id else (folder / "series").iterdir()
    git(fork, "am", *sorted(map(str, alone)))
    assert git(fork, "rev-parse", "HEAD^{tree}") == picked

from __future__ import annotations

import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from scripts.patchset.patch import read_patch
from tests.scripts import checkouts, toys
from tests.scripts.checkouts import Checkout
from tests.scripts.repos import git


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """Return a copy of the tools, its patches as they are exported."""
    made = checkouts.small(tmp_path_factory.mktemp("exported"))
    # The patches of the fixture come from plain git; the first export gives them their form.
    for fix in ("1", "2"):
        assert ended(made, "0.20.2", fix) == ""
        assert ended(made, "--continue") == ""
    return made


@pytest.fixture
def checkout(exported: Checkout, tmp_path: Path) -> Checkout:
    """Return a copy of the tools for one test."""
    return Checkout(shutil.copytree(exported.folder, tmp_path / "kvfix"), exported.cache)


def ended(checkout: Checkout, *words: str) -> str:
    """Run `edit` and return what it says on its error output."""
    result = checkout.run("edit", *words)
    assert "Traceback" not in result.stderr
    assert bool(result.returncode) == bool(result.stderr), result
    if result.returncode:
        assert result.returncode == 2
        assert "expected: " in result.stderr
        assert "next: " in result.stderr
    return result.stderr


def contents(checkout: Checkout) -> dict[str, bytes]:
    files = (path for path in checkout.patches.rglob("*") if path.is_file())
    return {str(path.relative_to(checkout.patches)): path.read_bytes() for path in files}


def worktree(checkout: Checkout) -> Path:
    return checkout.folder / ".work" / "edit"


@pytest.mark.parametrize("fix", ["1", "2"])
def test_that_changes_nothing_leaves_every_byte(checkout: Checkout, fix: str) -> None:
    before = contents(checkout)
    times = {path: path.stat().st_mtime_ns for path in checkout.patches.rglob("*")}
    ended(checkout, "0.20.2", fix)
    ended(checkout, "--continue")
    assert contents(checkout) == before
    assert {path: path.stat().st_mtime_ns for path in checkout.patches.rglob("*")} == times
    assert not worktree(checkout).exists()


def test_shows_one_fix_as_the_change_to_be_edited(checkout: Checkout) -> None:
    ended(checkout, "0.20.2", "2")
    text = (worktree(checkout) / toys.WORKER).read_text()
    assert "def work2(x):\n    return work1(x)\n" in text  # of the fix before it
    shown = git(worktree(checkout), "diff", "HEAD")
    assert [
        row for row in shown.splitlines() if row[:1] in "+-" and row[:3] not in ("+++", "---")
    ] == [
        "-    return x + 9",
        "+    return work1(x)",
    ]
    assert "kvfix" not in text  # the notice is stamped when patches are applied
    ended(checkout, "--abort")


def test_writes_back_a_changed_hunk(checkout: Checkout) -> None:
    before = contents(checkout)
    ended(checkout, "0.20.2", "2")
    path = worktree(checkout) / toys.WORKER
    path.write_text(path.read_text().replace("    return x + 5\n", "    return work1(x)\n"))
    ended(checkout, "--continue")
    after = contents(checkout)
    assert {name for name in after if after[name] != before[name]} == {"2-a-name/0.20.2.patch"}
    patch = read_patch(checkout.patches / "2-a-name" / "0.20.2.patch")
    assert [hunk.added for hunk in patch.files[toys.WORKER]] == [("    return work1(x)\n",)] * 2
    ended(checkout, "0.20.2", "2")  # and once more, from what was written
    ended(checkout, "--continue")
    assert contents(checkout) == after


def test_starts_a_patch_for_a_fix_that_has_none(checkout: Checkout) -> None:
    before = contents(checkout)
    (checkout.patches / "2-a-name" / "0.20.2.patch").unlink()
    ended(checkout, "0.20.2", "2")
    assert git(worktree(checkout), "diff", "HEAD") == ""
    path = worktree(checkout) / toys.WORKER
    path.write_text(path.read_text().replace("    return x + 9\n", "    return work1(x)\n"))
    ended(checkout, "--continue")
    assert contents(checkout) == before


def test_can_be_given_up(checkout: Checkout) -> None:
    before = contents(checkout)
    ended(checkout, "0.20.2", "1")
    (worktree(checkout) / toys.WORKER).write_text("changed\n")
    ended(checkout, "--abort")
    assert contents(checkout) == before
    assert "no edit to continue" in ended(checkout, "--continue")


def test_refuses_what_would_do_nothing(checkout: Checkout) -> None:
    before = contents(checkout)
    ended(checkout, "0.20.2", "1")
    for name in (toys.WORKER, toys.STATE):
        (worktree(checkout) / name).write_text(toys.FILES[name])
    assert "empty patch" in ended(checkout, "--continue")
    assert contents(checkout) == before
    assert worktree(checkout).exists()


@pytest.mark.parametrize("spoil", ["new", "gone"])
def test_refuses_files_that_are_new_or_gone(checkout: Checkout, spoil: str) -> None:
    before = contents(checkout)
    ended(checkout, "0.20.2", "1")
    if spoil == "new":
        (worktree(checkout) / "vllm" / "more.py").write_text("more\n")
    else:
        (worktree(checkout) / toys.WORKER).unlink()
    error = ended(checkout, "--continue")
    assert ("A vllm/more.py" if spoil == "new" else f"D {toys.WORKER}") in error
    assert contents(checkout) == before


def test_refuses_a_second_edit_and_says_what_to_do(checkout: Checkout) -> None:
    ended(checkout, "0.20.2", "1")
    assert "not finished" in ended(checkout, "0.20.2", "2")
    assert "fixes.toml has no fix 7" in ended(checkout, "0.20.2", "7")
    ended(checkout, "--abort")
    assert "no release and fix" in ended(checkout)


def test_what_a_kill_has_left_is_no_edit(checkout: Checkout, tmp_path: Path) -> None:
    found = shutil.which("git")
    program = tmp_path / "programs" / "git"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\ncase "$*" in *--soft*) kill -KILL $PPID;; esac\nexec {found} "$@"\n'
    )
    program.chmod(0o755)
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    assert checkout.run("edit", "0.20.2", "1", PATH=path).returncode == -signal.SIGKILL
    assert "no edit to continue" in ended(checkout, "--continue")
    assert not worktree(checkout).exists()
    ended(checkout, "0.20.2", "1")
    assert {path.name for path in worktree(checkout).parent.iterdir()} == {"edit", ".lock"}
    (worktree(checkout) / ".git" / "kvfix.json").unlink()  # as where it was being removed
    (worktree(checkout) / "left").touch()
    ended(checkout, "0.20.2", "2")
    assert not (worktree(checkout) / "left").exists()
    ended(checkout, "--continue")


def test_two_at_once_do_not_replace_each_other(checkout: Checkout) -> None:
    with ThreadPoolExecutor() as both:
        ends = [both.submit(checkout.run, "edit", "0.20.2", fix) for fix in ("1", "2")]
    assert sorted(end.result().returncode for end in ends) == [0, 2]
    (refused,) = (end.result().stderr for end in ends if end.result().returncode)
    assert "an edit that is not finished" in refused


def test_a_state_that_is_cut_off_is_no_traceback(checkout: Checkout) -> None:
    ended(checkout, "0.20.2", "1")
    (worktree(checkout) / ".git" / "kvfix.json").write_text('{"release": ')
    assert "keep what you need of .work/edit/vllm" in ended(checkout, "--continue")
    assert worktree(checkout).is_dir()
    ended(checkout, "--abort")
    assert not worktree(checkout).exists()


def test_a_series_that_does_not_apply_leaves_no_worktree(checkout: Checkout) -> None:
    path = checkout.patches / "1-a-name" / "0.20.2.patch"
    path.write_text(path.read_text().replace("-    return x + 2\n", "-    return y + 2\n"))
    result = checkout.run("edit", "0.20.2", "2")
    assert result.returncode == 18
    assert "wanted: '    return y + 2\\n'" in result.stderr
    assert not worktree(checkout).exists()


def test_refuses_a_release_that_needs_no_such_fix(checkout: Checkout) -> None:
    path = checkout.patches / "fixes.toml"
    path.write_text(path.read_text().replace('"<=0.20.2"', '"<0.20.2"', 1))
    assert "gives 0.20.2 no fix 1: it applies to <0.20.2" in ended(checkout, "0.20.2", "1")
    assert not worktree(checkout).exists()


def test_says_which_releases_the_patch_serves(checkout: Checkout) -> None:
    ended(checkout, "0.20.2", "2", "--only")
    path = worktree(checkout) / toys.WORKER
    path.write_text(path.read_text().replace("    return x + 5\n", "    return work1(x)\n"))
    said = checkout.run("edit", "--continue").stdout
    assert "Fix 2 on 0.20.2: 2-a-name/0.20.2.patch" in said
    assert "wrote patches/2-a-name/0.20.2.patch" in said


def test_says_where_the_first_patch_of_a_fix_does_not_apply(checkout: Checkout) -> None:
    change = ("    return x + 9\n", "    return x + 99\n")
    both = {"0.20.1": toys.FILES | {toys.WORKER: toys.changed(toys.WORKER, change)}}
    both["0.20.2"] = toys.FILES
    checkouts.carried(checkout, *both)
    checkout.lock(
        {
            release: {f"vllm-{release}.tar.gz": checkouts.sdist_bytes(files, release)}
            for release, files in both.items()
        }
    )
    (checkout.patches / "2-a-name" / "0.20.2.patch").unlink()
    [one] = checkout.patches.glob("1-*/0.20.2.patch")
    one.rename(one.with_name("0.20.1.patch"))
    assert ended(checkout, "0.20.1", "2") == ""
    path = worktree(checkout) / toys.WORKER
    path.write_text(path.read_text().replace("    return x + 99\n", "    return work1(x)\n"))
    said = checkout.run("edit", "--continue").stdout
    assert "Fix 2 on 0.20.1: 2-a-name/0.20.1.patch" in said
    assert "Still none for 0.20.2" in said
    assert "nox -s edit -- 0.20.2 2" in said

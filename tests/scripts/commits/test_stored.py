"""Which patch files there are, and their bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.commits import stored as module
from scripts.commits.stored import Change, newest_first, stored, write
from scripts.patchset.patch import apply_patches, parse_patch, read_patch
from scripts.patchset.registry import Unpatched
from scripts.patchset.series import patch_files, served
from scripts.system.errors import PatchDoesNotApplyError, RegistryError
from scripts.system.files import replace_text
from tests.scripts import repos, toys
from tests.scripts.system.test_git import hostile as hostile  # a fixture

MOVED = {**toys.FILES, toys.WORKER: '"""More."""\n' + toys.FILES[toys.WORKER]}
OTHER = {
    **toys.FILES,
    toys.WORKER: toys.changed(toys.WORKER, ("def work9(x):\n", "def work9(x, y=1):\n")),
}
RELEASES = {"0.9.2": toys.FILES, "0.10.0": MOVED, "0.11.0": OTHER, "0.12.0": OTHER}
FIX = toys.fix("2", applies_to=">=0")
REGISTRY = toys.registry(toys.fix("1", applies_to=">=0"), FIX)
NINE = ("    return x + 9\n", "    return work1(x)\n")
FIVE = ("    return x + 5\n", "    return work1(x)\n")


@pytest.fixture
def patches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder in which one file of each fix serves 0.9.2 and 0.10.0, another one the rest.

    That of fix 1 is one file: its diff is the same on all.
    """

    def read(release: str, path: str) -> str:
        if path not in RELEASES[release]:
            raise RegistryError(f"no {path}", expected="", next_step="")
        return RELEASES[release][path]

    monkeypatch.setattr(module, "read_source", read)
    folder = tmp_path / "patches"
    have(folder, "1", "0.9.2", toys.ONE)
    for release in ("0.9.2", "0.11.0"):
        have(folder, "2", release, toys.TWO if release == "0.9.2" else with_(release, NINE))
    write(stored(REGISTRY, RELEASES, folder=folder), REGISTRY, folder)
    return folder


def with_(release: str, *pairs: tuple[str, str]) -> dict[str, str]:
    """Return the worker of a release with some passages replaced."""
    return {toys.WORKER: toys.changed(toys.WORKER, *pairs, files=RELEASES[release])}


def text(fix: str, release: str, after: Mapping[str, str], folder: Path) -> str:
    """Return what plain git makes of a release and the changed files `after`."""
    repos.commit(folder, RELEASES[release], "before")
    repos.commit(folder, after, "after")
    return repos.stored(folder, fix=f"{fix}-a-name", release=release)


def have(folder: Path, fix: str, release: str, after: Mapping[str, str]) -> None:
    made = text(fix, release, after, folder.parent / f"{fix}-of-{release}")
    repos.write(folder, {f"{fix}-a-name/{release}.patch": made})


def serving(folder: Path, fix: str = "2") -> dict[str, list[str]]:
    entry = REGISTRY.fixes[fix]
    return served(entry, patch_files(entry, folder), RELEASES)


def contents(folder: Path) -> dict[str, str]:
    return {p.relative_to(folder).as_posix(): p.read_text() for p in folder.rglob("*.patch")}


def change(folder: Path, release: str, *pairs: tuple[str, str], alone: bool = False) -> list[str]:
    """Have fix 2 do something else on a release; return the files that changed."""
    made = text("2", release, with_(release, *pairs), folder.parent / "changed" / release)
    patch = parse_patch(f"2-a-name/{release}.patch", made)
    new = stored(REGISTRY, RELEASES, Change(release, {"2": patch}, alone=alone), folder)
    return write(new, REGISTRY, folder)


def test_there_is_a_file_only_where_a_diff_is_new(patches: Path) -> None:
    assert serving(patches, "1") == {"0.9.2": ["0.9.2", "0.10.0", "0.11.0", "0.12.0"]}
    assert serving(patches) == {"0.9.2": ["0.9.2", "0.10.0"], "0.11.0": ["0.11.0", "0.12.0"]}


def test_a_file_is_its_head_and_what_git_makes_of_the_release_that_names_it(patches: Path) -> None:
    for name, made in contents(patches).items():
        head, serves, diff = made.split("\n", 2)
        assert head == f"Fix: {name.partition('/')[0]}"
        patch = read_patch(patches / name)
        assert serves == f"Serves: {', '.join(patch.serves)}"
        assert patch.serves[0] == Path(name).stem
        assert "\nindex " not in diff
        # Its lines are counted with the fixes before it applied.
        first = patch.serves[0]
        before = [read_patch(patches / "1-a-name" / "0.9.2.patch")] if patch.fix_id == "2" else []
        texts, moved = apply_patches([*before, patch], RELEASES[first].__getitem__)
        assert all(offset.patch != patch.name for offset in moved)
        assert "work1(x)" in texts[toys.WORKER]


def test_made_anew_it_has_the_same_bytes_and_settings_leave_no_trace(
    patches: Path, request: pytest.FixtureRequest
) -> None:
    before = contents(patches)
    assert stored(REGISTRY, RELEASES, folder=patches) == before
    request.getfixturevalue("hostile")
    assert stored(REGISTRY, RELEASES, folder=patches) == before
    assert write(before, REGISTRY, patches) == []


def test_a_change_is_for_the_releases_of_its_file(patches: Path) -> None:
    assert change(patches, "0.10.0", NINE, FIVE) == ["2-a-name/0.9.2.patch"]
    assert serving(patches) == {"0.9.2": ["0.9.2", "0.10.0"], "0.11.0": ["0.11.0", "0.12.0"]}
    assert contents(patches)["2-a-name/0.9.2.patch"].count("\n+") == 3  # with the +++ line
    assert contents(patches)["2-a-name/0.11.0.patch"].count("\n+") == 2


def test_a_change_for_one_release_alone_splits_its_file(patches: Path) -> None:
    before = contents(patches)
    assert change(patches, "0.10.0", NINE, FIVE, alone=True) == [
        "2-a-name/0.10.0.patch",
        "2-a-name/0.9.2.patch",  # its head
    ]
    assert serving(patches) == {
        "0.9.2": ["0.9.2"],
        "0.10.0": ["0.10.0"],
        "0.11.0": ["0.11.0", "0.12.0"],
    }
    # Equal to its neighbour again, it goes.
    assert change(patches, "0.10.0", NINE) == ["2-a-name/0.10.0.patch", "2-a-name/0.9.2.patch"]
    assert contents(patches) == before


def test_a_change_in_the_middle_leaves_what_comes_after_as_it_was(patches: Path) -> None:
    before = {one: result(patches, one) for one in RELEASES}
    change(patches, "0.9.2", NINE, FIVE, alone=True)
    change(patches, "0.11.0", NINE, FIVE, alone=True)
    assert list(serving(patches)) == ["0.9.2", "0.10.0", "0.11.0", "0.12.0"]
    assert {one: result(patches, one) == before[one] for one in RELEASES} == {
        "0.9.2": False,
        "0.10.0": True,
        "0.11.0": False,
        "0.12.0": True,
    }


def result(folder: Path, release: str) -> dict[str, str]:
    patches = [
        read_patch(folder / f"{fix}-a-name" / f"{first}.patch")
        for fix in REGISTRY.fixes
        for first, releases in serving(folder, fix).items()
        if release in releases
    ]
    return apply_patches(patches, RELEASES[release].__getitem__)[0]


def test_a_new_fix_serves_where_it_applies_and_nothing_is_lost_where_it_does_not(
    patches: Path,
) -> None:
    for path in (patches / "2-a-name").iterdir():
        path.unlink()
    assert change(patches, "0.10.0", NINE) == ["2-a-name/0.9.2.patch"]
    first = (patches / "2-a-name" / "0.9.2.patch").read_text()
    # By its name the file is also for 0.11.0 on, where its context is not: known to be nothing.
    assert change(patches, "0.12.0", NINE) == ["2-a-name/0.11.0.patch", "2-a-name/0.9.2.patch"]
    assert serving(patches) == {"0.9.2": ["0.9.2", "0.10.0"], "0.11.0": ["0.11.0", "0.12.0"]}
    now = (patches / "2-a-name" / "0.9.2.patch").read_text()
    assert now.split("\n")[2:] == first.split("\n")[2:]


def test_a_file_that_applies_nowhere_stays_for_a_person(patches: Path) -> None:
    path = patches / "2-a-name" / "0.11.0.patch"
    path.write_text(path.read_text().replace("x + 9", "y + 9"))
    before = contents(patches)
    assert stored(REGISTRY, RELEASES, folder=patches) == before


def test_what_the_registry_ends_is_no_more(patches: Path) -> None:
    ended = toys.registry(
        REGISTRY.fixes["1"],
        replace(FIX, applies_to="<0.12", unpatched=(Unpatched("==0.9.2", "why"),)),
    )
    made = stored(ended, RELEASES, folder=patches)
    assert sorted(made) == [
        "1-a-name/0.9.2.patch",
        "2-a-name/0.10.0.patch",
        "2-a-name/0.11.0.patch",
    ]
    assert "Serves: 0.11.0\n" in made["2-a-name/0.11.0.patch"]
    write(made, ended, patches)
    assert sorted(contents(patches)) == sorted(made)


def test_a_change_that_does_not_apply_is_refused(patches: Path) -> None:
    patch = read_patch(patches / "2-a-name" / "0.9.2.patch")
    before = contents(patches)
    with pytest.raises(PatchDoesNotApplyError):
        stored(REGISTRY, RELEASES, Change("0.11.0", {"2": patch}, alone=False), patches)
    assert contents(patches) == before


def test_files_of_later_releases_come_first() -> None:
    names = ["a/0.9.2.patch", "b/0.10.0.patch", "a/0.11.0.patch"]
    assert newest_first(names) == ["a/0.11.0.patch", "b/0.10.0.patch", "a/0.9.2.patch"]


def test_at_each_moment_of_writing_a_release_has_a_file_that_makes_the_same(
    patches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = text("2", "0.9.2", with_("0.9.2", NINE, FIVE), patches.parent / "new")
    change = Change("0.9.2", {"2": parse_patch("2-a-name/0.9.2.patch", made)}, alone=True)
    new = stored(REGISTRY, RELEASES, change, patches)
    others = {one: result(patches, one) for one in RELEASES if one != "0.9.2"}

    def put_and_look(path: Path, content: str) -> None:
        replace_text(path, content)
        assert {one: result(patches, one) for one in others} == others

    monkeypatch.setattr(module, "replace_text", put_and_look)
    assert write(new, REGISTRY, patches) == ["2-a-name/0.10.0.patch", "2-a-name/0.9.2.patch"]

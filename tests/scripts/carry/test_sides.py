"""Which release fixes are carried from: the nearest below or above, and fix by fix the other."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from scripts.carry.merge import Status
from scripts.carry.trial import Start, Trial, neighbours, start_of, try_all
from scripts.patchset.patch import Patch, read_patch
from scripts.patchset.series import Series
from scripts.prove.stock import Stock
from scripts.system.errors import NotCarriedError
from scripts.system.git import Repository
from scripts.upstream.history import Upstream
from tests.scripts import checkouts, toys
from tests.scripts.carrying import REGISTRY, WORKER, carrying, release
from tests.scripts.repos import commit, git, stored_of, write

TWO = ("    return x + 2\n", "    return work1(x)\n")
FAILS = dict.fromkeys(("1", "2"), Stock.FAILS)


def worker(*pairs: tuple[str, str]) -> dict[str, str]:
    return {WORKER: toys.changed(WORKER, *pairs)}


def one_more(n: int) -> tuple[str, str]:
    """Make a function of the toy another one, which collides with a fix of it."""
    return f"    return x + {n}\n", f"    return {n} + x\n"


def fixed(texts: Mapping[str, str], *numbers: int) -> dict[str, str]:
    """Return the toy with functions fixed, whatever they were."""
    lines = texts[WORKER].splitlines(keepends=True)
    for n in numbers:
        lines[lines.index(f"def work{n}(x):\n") + 1] = "    return work1(x)\n"
    return {WORKER: "".join(lines)}


def a_patch(folder: Path, name: str, before: Mapping[str, str], after: Mapping[str, str]) -> Patch:
    text = stored_of(folder / "made" / name, before, after)
    write(folder, {name: text.replace("1-it", name.partition("/")[0], 1)})
    return read_patch(folder / name)


def a_series(folder: Path, release: str, texts: Mapping[str, str], *fixes: str) -> Series:
    """Return a series of fix 1, which is work2's, and fix 2, which is work9's."""
    patches, numbers = [], {"1": 2, "2": 9}
    now = dict(texts)
    for fix in fixes:
        after = fixed(now, numbers[fix])
        patches.append(a_patch(folder, f"{fix}-a-name/{release}.patch", now, after))
        now = after
    return Series(release, tuple(patches))


def tried(
    folder: Path,
    below: tuple[Mapping[str, str], str],
    above: tuple[Mapping[str, str], str],
    between: Mapping[str, str],
) -> tuple[Start, Trial]:
    """Carry the fixes (their ids) of two releases with these texts to one between them."""
    for number, texts in (("1", below[0]), ("2", between), ("3", above[0])):
        commit(folder / "all", texts, number)
        git(folder / "all", "tag", f"v{number}")
    releases = Upstream(Repository(folder / "all"), "here")
    series = [
        a_series(folder / "series", number, texts, *fixes)
        for number, (texts, fixes) in (("1", below), ("3", above))
    ]
    begin = start_of(releases, series, "2", REGISTRY, FAILS)
    return begin, try_all(releases, begin.series, "2", REGISTRY, FAILS)


def test_it_starts_where_more_applies_exactly(tmp_path: Path) -> None:
    same, other = worker(), worker(one_more(9))
    begin, trial = tried(tmp_path / "above", (same, "12"), (other, "12"), other)
    assert [one.release for one in begin.series] == ["3", "1"]
    assert begin.why == (
        "from 3: from 3 2 of 2 hunks apply exactly, 0 merge; "
        "from 1 1 of 2 hunks apply exactly, 0 merge"
    )
    assert {(one.fix, one.source, one.status) for one in trial.results} == {
        ("1", "3", Status.CARRIED),
        ("2", "3", Status.CARRIED),
    }
    assert trial.texts == fixed(other, 2, 9)
    begin, trial = tried(tmp_path / "below", (other, "12"), (same, "12"), other)
    assert [one.release for one in begin.series] == ["1", "3"]
    assert {one.source for one in trial.results} == {"1"}


def test_where_both_are_as_good_it_starts_below(tmp_path: Path) -> None:
    begin, trial = tried(tmp_path, (worker(), "12"), (worker(), "12"), worker())
    assert [one.release for one in begin.series] == ["1", "3"]
    assert [one.source for one in trial.results] == ["1", "1"]


def test_where_as_much_applies_exactly_more_that_merges_counts(tmp_path: Path) -> None:
    near = worker(
        ("def work3(x):\n", "def work3(x, y=1):\n"), ("def work10(x):\n", "def work10(x, y=1):\n")
    )
    below = worker(one_more(9), one_more(2))
    begin, trial = tried(tmp_path, (below, "12"), (near, "12"), worker())
    assert [one.release for one in begin.series] == ["3", "1"]
    assert [one.exact for one in begin.trials] == [0, 0]
    assert {(one.source, one.status) for one in trial.results} == {("3", Status.MERGED)}


def test_a_fix_that_collides_comes_from_the_other_side(tmp_path: Path) -> None:
    between = worker(one_more(9))
    below, above = worker(), worker(one_more(2), one_more(9))
    begin, trial = tried(tmp_path, (below, "12"), (above, "12"), between)
    assert [one.release for one in begin.series] == ["1", "3"]
    assert [(one.fix, one.source, one.status) for one in trial.results] == [
        ("1", "1", Status.CARRIED),
        ("2", "3", Status.CARRIED),
    ]
    assert trial.texts == fixed(between, 2, 9)


def test_a_fix_that_only_one_side_has_comes_from_there(tmp_path: Path) -> None:
    _, trial = tried(tmp_path, (worker(), "1"), (worker(), "12"), worker())
    assert [(one.fix, one.source) for one in trial.results] == [("1", "3"), ("2", "3")]
    _, trial = tried(tmp_path / "both", (worker(), "1"), (worker(), "2"), worker())
    assert [(one.fix, one.source) for one in trial.results] == [("1", "1"), ("2", "3")]
    assert trial.texts == fixed(worker(), 2, 9)


def test_what_collides_on_both_sides_is_shown_as_the_first_has_it(tmp_path: Path) -> None:
    between = worker(("    return x + 9\n", "    return x * 9\n"))
    _, trial = tried(tmp_path, (worker(), "12"), (worker(one_more(9)), "12"), between)
    assert [(one.fix, one.source, one.status) for one in trial.results] == [
        ("1", "1", Status.CARRIED),
        ("2", "1", Status.CONFLICT),
    ]


@pytest.mark.parametrize(
    ("release", "found"),
    [
        ("0.20.1", ["0.20.0", "0.20.2"]),
        ("0.20.2", ["0.20.0", "0.33.0"]),
        ("0.32.0", ["0.20.2", "0.33.0"]),
        ("0.34.0", ["0.33.0"]),
        ("0.18.0", ["0.20.0"]),
    ],
)
def test_the_neighbours_of_a_release(
    release: str, found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    carried = ["0.20.0", "0.20.2", "0.33.0"]
    monkeypatch.setattr("scripts.carry.trial.carried_releases", lambda: carried)
    assert neighbours(release) == found
    assert neighbours(release, "0.20.0") == ["0.20.0"]
    with pytest.raises(NotCarriedError, match=r"0\.19\.0"):
        neighbours(release, "0.19.0")


@pytest.mark.timeout(600)
def test_what_is_carried_downward_takes_the_file_over(tmp_path: Path) -> None:
    checkout = carrying(tmp_path)
    later = {**toys.FILES, **worker(one_more(9))}
    release(checkout, "0.22.0", later)
    name = "2-a-name/0.22.0.patch"
    text = a_patch(tmp_path / "new", name, worker(one_more(9)), fixed(later, 9)).diff
    head = "Fix: 2-a-name\nServes: 0.22.0\n"
    (checkout.patches / name).write_text(head + text)
    checkouts.carried(checkout, "0.20.2", "0.22.0")
    result = checkout.run("edit", "--restamp")
    assert result.returncode == 0, result.stderr
    release(checkout, "0.21.0", later)
    release(checkout, "0.21.1", later)  # nobody carries to it, so nothing is ever applied to it

    result = checkout.run("rebase", "0.21.0", timeout=500)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "from 0.22.0: from 0.22.0" in result.stdout
    report = json.loads((checkout.folder / "reports" / "rebase-0.21.0.json").read_text())
    assert [(one["fix"], one["source"]) for one in report["fixes"]] == [
        ("1", "0.22.0"),
        ("2", "0.22.0"),
    ]
    found = map(read_patch, sorted(checkout.patches.glob("*/*.patch")))
    assert {patch.name: patch.serves for patch in found} == {
        "1-a-name/0.20.2.patch": ("0.20.2", "0.21.0", "0.22.0"),
        "2-a-name/0.20.2.patch": ("0.20.2",),
        "2-a-name/0.21.0.patch": ("0.21.0", "0.22.0"),
    }
    assert checkout.run("edit", "--restamp").returncode == 0
    assert "wrote" not in result.stderr

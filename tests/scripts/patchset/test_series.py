"""Which patch serves which release."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.patchset import series as module
from scripts.patchset.patch import head
from scripts.patchset.registry import Registry, Unpatched, load_registry
from scripts.patchset.series import (
    Series,
    carried_releases,
    first_serving,
    load_series,
    patch_files,
    served,
)
from scripts.project import Project, project
from scripts.system.errors import NotCarriedError, RegistryError
from tests.scripts import toys
from tests.scripts.repos import write

RELEASES = ("0.9.2", "0.10.0", "0.10.1", "0.11.0")
DIFF = "diff --git a/vllm/a.py b/vllm/a.py\n--- a/vllm/a.py\n+++ b/vllm/a.py\n@@ -1 +1 @@\n-a\n+b\n"
ONE, TWO = toys.fix("1", applies_to=">=0"), toys.fix("2", applies_to=">=0")


@pytest.fixture(autouse=True)
def patches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a folder without patches in place of the repository's own, and releases of our own."""
    monkeypatch.setattr(module, "PATCHES", tmp_path)
    monkeypatch.setattr(module, "project", lambda: Project("0.1.0", RELEASES[::-1], "0.10.0"))
    monkeypatch.setattr(module, "load_lock", lambda: dict.fromkeys([*RELEASES, "0.12.0"]))
    return tmp_path


def have(patches: Path, fix: str, *firsts: str) -> None:
    write(patches, {f"{fix}/{one}.patch": head(fix, [one]) + DIFF for one in firsts})


def found(release: str, *fixes: str | None, registry: Registry) -> list[str]:
    return [patch.name for patch in load_series(release, registry).patches]


def names(registry: Registry, releases: Sequence[str] = RELEASES) -> list[list[str]]:
    """Return, for each release, the patches that it gets."""
    return [found(release, registry=registry) for release in releases]


def test_a_file_serves_every_release_up_to_the_next_file(patches: Path) -> None:
    have(patches, "1-a-name", "0.9.2", "0.10.1")
    assert names(toys.registry(ONE)) == [
        ["1-a-name/0.9.2.patch"],
        ["1-a-name/0.9.2.patch"],
        ["1-a-name/0.10.1.patch"],
        ["1-a-name/0.10.1.patch"],
    ]
    files = patch_files(ONE)
    assert list(files) == ["0.9.2", "0.10.1"]  # by version, not by name
    assert served(ONE, files, RELEASES[::-1]) == {
        "0.9.2": ["0.9.2", "0.10.0"],
        "0.10.1": ["0.10.1", "0.11.0"],
    }
    assert first_serving(files, "0.9.1") is None


def test_the_order_is_that_of_the_registry(patches: Path) -> None:
    have(patches, "1-a-name", "0.9.2")
    have(patches, "2-a-name", "0.9.2")
    for registry in (toys.registry(ONE, TWO), toys.registry(TWO, ONE)):
        assert load_series("0.10.0", registry).fix_ids == tuple(registry.fixes)


def test_the_registry_says_where_a_range_ends(patches: Path) -> None:
    have(patches, "1-a-name", "0.9.2")
    spare = Unpatched("==0.10.0", "nobody runs it")
    one = replace(ONE, applies_to="<0.11", unpatched=(spare,))
    assert [bool(row) for row in names(toys.registry(one))] == [True, False, True, False]
    assert served(one, patch_files(one), RELEASES) == {"0.9.2": ["0.9.2", "0.10.1"]}


def test_a_release_that_was_not_carried_gets_nothing(patches: Path) -> None:
    have(patches, "1-a-name", "0.9.2")
    for release in ("0.12.0", "0.10.2"):  # pinned, not pinned
        with pytest.raises(NotCarriedError, match=f"not carried to vLLM {release}") as caught:
            load_series(release, toys.registry(ONE))
        assert caught.value.expected == "one of 0.9.2, 0.10.0, 0.10.1, 0.11.0"
        assert caught.value.next_step == f"nox -s rebase -- {release}"


def test_a_fix_without_a_patch_is_no_fix_that_is_left_out(patches: Path) -> None:
    have(patches, "1-a-name", "0.10.0")
    with pytest.raises(RegistryError, match=r"fix 1 applies to 0\.9\.2 and has no patch"):
        load_series("0.9.2", toys.registry(ONE))


@pytest.mark.parametrize("name", ["first", "v0.10.0", "0.10.0rc1", "0.9.2.0"])
def test_a_file_is_named_by_a_release(patches: Path, name: str) -> None:
    have(patches, "1-a-name", "0.9.2", name)
    with pytest.raises(RegistryError, match=f"1-a-name/{name}.patch is not named by a release"):
        patch_files(ONE)


def test_gives_a_fix_with_what_it_depends_on(tmp_path: Path) -> None:
    series = toys.series(tmp_path)
    assert [p.fix_id for p in series.only(["2"], toys.REGISTRY)] == ["1", "2"]
    assert [p.fix_id for p in series.only(["1"], toys.REGISTRY)] == ["1"]
    # Where a release has no patch for it, it does not need it.
    short = Series("0.21.0", series.patches[1:])
    assert [p.fix_id for p in short.only(["2"], toys.REGISTRY)] == ["2"]


class TestOfThisRepository:
    @pytest.fixture(autouse=True)
    def patches(self) -> None:
        """Take the repository's own."""

    def test_every_supported_release_is_carried(self) -> None:
        assert set(carried_releases()) == set(project().releases)

    @pytest.mark.parametrize("release", project().releases)
    def test_each_release_has_what_the_registry_says(self, release: str) -> None:
        series, registry = load_series(release), load_registry()
        needed = [fix.id for fix in registry.fixes.values() if fix.needed_on(release)]
        assert list(series.fix_ids) == needed
        assert all(release in patch.serves for patch in series.patches)

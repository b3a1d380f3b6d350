from __future__ import annotations

from pathlib import Path

import pytest

from scripts.patchset import series as series_module
from scripts.patchset.registry import load_registry
from scripts.patchset.series import Series, load_series, patch_names, releases_by_line
from scripts.project import project
from scripts.system.errors import NoLineError, RegistryError
from tests.scripts import toys


@pytest.fixture
def patches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a line of two patches, with their series file, in place of the repository's own."""
    folder = tmp_path / "patches" / "v0.20"
    folder.mkdir(parents=True)
    toys.series(folder)
    (folder / "series").write_text("# first this\n1-a-name.patch\n\n  2-a-name.patch  \n")
    monkeypatch.setattr(series_module, "PATCHES", folder.parent)
    return folder


def test_has_the_patches_in_their_order(patches: Path) -> None:
    assert patch_names("v0.20") == ("1-a-name.patch", "2-a-name.patch")
    found = load_series("v0.20")
    assert found.line == "v0.20"
    assert found.fix_ids == ("1", "2")


def test_of_a_line_that_is_not_there_names_those_that_are(patches: Path) -> None:
    with pytest.raises(NoLineError, match=r"v0\.99") as caught:
        load_series("v0.99")
    assert caught.value.expected == "one of v0.20"


def test_refuses_a_row_without_a_patch(patches: Path) -> None:
    (patches / "2-a-name.patch").unlink()
    with pytest.raises(RegistryError, match=r"v0\.20/series lists 2-a-name\.patch"):
        load_series("v0.20")


def test_gives_a_fix_with_what_it_depends_on(tmp_path: Path) -> None:
    series = toys.series(tmp_path)
    assert [p.fix_id for p in series.only(["2"], toys.REGISTRY)] == ["1", "2"]
    assert [p.fix_id for p in series.only(["1"], toys.REGISTRY)] == ["1"]
    # Where the line has no patch for it, its releases do not need it.
    short = Series("v0.21", series.patches[1:])
    assert [p.fix_id for p in short.only(["2"], toys.REGISTRY)] == ["2"]


class TestOfThisRepository:
    def test_has_a_line_for_each_release(self) -> None:
        lines = releases_by_line()
        assert sorted(r for releases in lines.values() for r in releases) == sorted(
            project().releases
        )
        assert lines["v0.20"] == ["0.20.0", "0.20.1", "0.20.2"]  # the newest one last

    @pytest.mark.parametrize("line", releases_by_line())
    def test_can_be_read_and_names_fixes_of_the_registry(self, line: str) -> None:
        series, registry = load_series(line), load_registry()
        assert set(series.fix_ids) <= registry.fixes.keys()
        assert all(patch.trailers == registry.trailers(registry.fixes[patch.fix_id])
                   for patch in series.patches)  # fmt: skip

"""Some of a release's fixes: what comes along, what cannot be left out, and what it is called."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from packaging.version import Version

from scripts.patchset.choice import ALWAYS, label, only, without
from scripts.patchset.patch import apply_patches
from scripts.patchset.registry import Registry, load_registry
from scripts.patchset.series import Series
from scripts.patchset.target import Target
from scripts.project import project
from scripts.system.errors import UsageError
from scripts.wheel.names import MARK, is_patched, patched_version, states_choice
from tests.scripts import toys

REGISTRY = toys.registry(
    toys.fix(ALWAYS),
    toys.fix("1"),
    toys.fix("K02", depends_on=("1",)),
    toys.fix("K03", depends_on=("K02",)),
    toys.fix("4"),
)


@pytest.fixture
def whole(tmp_path: Path) -> Series:
    """Return a series of five fixes; the text of their patches plays no part."""
    one = toys.patch(tmp_path, toys.fix("any"), toys.ONE)
    return Series("0.20.2", tuple(replace(one, fix_id=i) for i in REGISTRY.fixes))


@pytest.mark.parametrize(
    ("asked", "inside", "called"),
    [
        (["K03"], [ALWAYS, "1", "K02", "K03"], "without.4"),
        (["1"], [ALWAYS, "1"], "only.1"),
        (["4", "1"], [ALWAYS, "1", "4"], "without.k02.k03"),
        ([], [ALWAYS], "only.k00"),
        (["K03", "4"], [ALWAYS, "1", "K02", "K03", "4"], ""),
    ],
)
def test_a_fix_brings_what_it_depends_on(
    whole: Series, asked: list[str], inside: list[str], called: str
) -> None:
    chosen = only(whole, asked, REGISTRY)
    assert list(chosen.fix_ids) == inside
    assert label(chosen, whole, REGISTRY) == called


def test_what_nothing_depends_on_can_be_left_out(whole: Series) -> None:
    chosen = without(whole, ["K03"], REGISTRY)
    assert chosen.fix_ids == (ALWAYS, "1", "K02", "4")
    assert label(chosen, whole, REGISTRY) == "without.k03"
    assert without(whole, [], REGISTRY) == whole


def test_the_same_choice_has_one_name(whole: Series) -> None:
    one = only(whole, ["K02", "4"], REGISTRY)
    other = without(whole, ["K03"], REGISTRY)
    assert one == other
    assert label(one, whole, REGISTRY) == label(other, whole, REGISTRY) == "without.k03"


@pytest.mark.parametrize(
    ("left_out", "words"),
    [
        (["1"], "K02, K03 cannot stand without 1"),
        (["1", "K02"], "K03 cannot stand without 1, K02"),
        ([ALWAYS], "cannot be left out"),
        (["K99"], "gets no fix called K99"),
    ],
)
def test_what_another_needs_cannot_be_left_out(
    whole: Series, left_out: list[str], words: str
) -> None:
    with pytest.raises(UsageError) as refused:
        without(whole, left_out, REGISTRY)
    assert words in refused.value.found
    if "stand" in words:
        assert refused.value.next_step.endswith("--without 1,K02,K03")


def test_a_choice_stands_in_the_version() -> None:
    version = patched_version(Version("0.20.2+cu129"), "0.1.0", "only.k01")
    assert str(version) == "0.20.2+cu129.kvfix.0.1.0.only.k01"
    assert is_patched(version)
    assert states_choice(version)
    assert not states_choice(patched_version(Version("0.20.2"), "0.1.0"))


def _with_those_that_need(fix_id: str, series: Series, registry: Registry) -> list[str]:
    return [one for one in series.fix_ids if fix_id in registry.with_dependencies({one})]


@pytest.mark.parametrize("release", [project().default_release, project().releases[-1]])
def test_each_real_fix_can_be_left_out(release: str) -> None:
    """With what depends on it; the rest applies exactly, and no two choices share a name."""
    registry, target = load_registry(), Target.of(release)
    called = set()
    for fix_id in target.series.fix_ids:
        if fix_id != ALWAYS:
            left_out = _with_those_that_need(fix_id, target.series, registry)
            chosen = target.lacking(left_out, registry)
            apply_patches(chosen.patches, chosen.read)
            assert target.having(chosen.series.fix_ids, registry) == chosen
            called.add(chosen.choice)
    assert len(called) == len(target.patches) - 1
    assert MARK not in "".join(called)

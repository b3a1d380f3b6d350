from __future__ import annotations

import pytest

from scripts.patchset import series
from scripts.patchset import target as module
from scripts.patchset.series import load_series
from scripts.patchset.target import Target
from scripts.project import project
from scripts.system.errors import NotCarriedError, NotLockedError, UnknownReleaseError
from scripts.upstream.lock import LockedFile, locked_release


@pytest.mark.parametrize("release", project().releases)
def test_is_a_release_with_its_pins_and_its_fixes(release: str) -> None:
    target = Target.named(release)
    assert target.release == release
    assert target.locked == locked_release(release)
    assert target.patches == load_series(release).patches


def test_a_release_that_is_not_carried_or_not_pinned_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(UnknownReleaseError):
        Target.named("0.20")
    with pytest.raises(NotLockedError):
        Target.of("0.17.1")
    monkeypatch.setattr(series, "carried_releases", lambda: ["0.20.2"])
    with pytest.raises(NotCarriedError):
        Target.of("0.21.0")


def test_its_wheel_is_that_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[LockedFile] = []
    monkeypatch.setattr(module, "fetch", fetched.append)
    target = Target.named(project().default_release)
    for arch in ("x86_64", "aarch64"):
        _, pinned = target.wheel_for(arch)
        assert arch in pinned.name
        assert fetched[-1] == pinned == target.locked.wheel_for(arch)


def test_its_sources_are_those_of_the_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "read_source", lambda release, path: f"{path} of {release}")
    target = Target.named(project().default_release)
    assert target.read("vllm/x.py") == f"vllm/x.py of {project().default_release}"

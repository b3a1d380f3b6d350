from __future__ import annotations

import shutil

import pytest
from packaging.requirements import Requirement

from scripts.prove import environment
from scripts.prove.environment import Environment, needs
from scripts.system.errors import UsageError
from scripts.upstream.lock import load_lock


@pytest.mark.parametrize("release", load_lock())
def test_every_pinned_release_has_one_nixl_and_no_requirement_twice(release: str) -> None:
    requirements, overrides = needs(release)
    names = [Requirement(one).name for one in requirements]
    assert names.count("nixl") == 1
    assert len({*names}) == len(names)
    assert not {*names} & {Requirement(one).name for one in overrides}


def test_only_the_release_that_needs_an_override_has_one() -> None:
    assert [release for release in load_lock() if needs(release)[1]] == ["0.33.0"]
    assert "nixl==1.5.0" in needs("0.33.0")[0]
    assert "nixl==1.0.1" in needs("0.22.1")[0]


def test_an_override_without_uv_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(environment, "fetch", lambda file: file.name)
    with pytest.raises(UsageError) as caught:
        Environment("0.33.0").make()
    assert "certifi" in caught.value.found
    assert "uv" in caught.value.next_step

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from scripts.project import ROOT
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


_TAKES = """
import pathlib, sys
from scripts.project import ROOT
from scripts.prove import environment
environment.ROOT = pathlib.Path(sys.argv[1])
environment.have_to_itself("0.20.2")
environment.have_to_itself("0.20.2")
print("has it", flush=True)
sys.stdin.read()
"""


def test_an_environment_is_one_sessions_at_a_time(tmp_path: Path) -> None:
    def session() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", _TAKES, tmp_path],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    with session() as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "has it\n"
        with session() as second:
            assert second.stderr is not None
            said = second.stderr.readline()
            assert said == "another process has the environment of 0.20.2; waiting for it\n"
            first.kill()
            assert second.communicate(timeout=60)[0] == "has it\n"


def test_an_override_without_uv_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(environment, "fetch", lambda file: file.name)
    with pytest.raises(UsageError) as caught:
        Environment("0.33.0").make()
    assert "certifi" in caught.value.found
    assert "uv" in caught.value.next_step

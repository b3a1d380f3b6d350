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
for release in sys.argv[2:]:
    environment.have_to_itself(release)
    print("has", release, flush=True)
    sys.stdin.readline()
"""


def test_an_environment_is_one_sessions_at_a_time(tmp_path: Path) -> None:
    def session(*releases: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", _TAKES, tmp_path, *releases],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def says(process: subprocess.Popen[str], what: str) -> None:
        assert process.stdout is not None
        assert process.stdout.readline() == f"{what}\n"

    def waits(process: subprocess.Popen[str], release: str) -> None:
        assert process.stderr is not None
        said = process.stderr.readline()
        assert said == f"another process has the environment of {release}; waiting for it\n"

    def goes_on(process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()

    with session("0.20.2", "0.33.0") as first, session("0.33.0", "0.20.2") as second:
        says(first, "has 0.20.2")
        says(second, "has 0.33.0")
        goes_on(first)  # to what the second has
        waits(first, "0.33.0")
        goes_on(second)  # to what the first had
        says(second, "has 0.20.2")
        says(first, "has 0.33.0")
        with session("0.20.2") as third:
            waits(third, "0.20.2")
            second.kill()
            says(third, "has 0.20.2")
            third.kill()
        first.kill()


def test_an_override_without_uv_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(environment, "fetch", lambda file: file.name)
    with pytest.raises(UsageError) as caught:
        Environment("0.33.0").make()
    assert "certifi" in caught.value.found
    assert "uv" in caught.value.next_step

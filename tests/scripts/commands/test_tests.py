"""`nox -s tests`, the part that needs vLLM: which release, how many processes, whose words."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import pytest

from scripts.commands import tests as command
from scripts.commands.tests import arguments, split
from scripts.project import ROOT, project
from scripts.prove.forks import Fork
from scripts.system.errors import CheckFailedError, UnknownReleaseError
from scripts.system.process import Finished

OVERLAY = str(ROOT / "tests" / "overlay")


@pytest.mark.parametrize(
    ("words", "release", "rest"),
    [
        ([], project().default_release, []),
        (["tests/overlay", "-k", "a b"], project().default_release, [OVERLAY, "-k", "a b"]),
        (["--release", "v0.33.0"], "0.33.0", []),
        (["tests/overlay", "--release=0.33.0", "-x", "--durations=3"], "0.33.0",
         [OVERLAY, "-x", "--durations=3"]),
        (["--rel", "--fixtures"], project().default_release, ["--rel", "--fixtures"]),
    ],
)  # fmt: skip
def test_all_but_the_release_goes_to_pytest(
    words: list[str], release: str, rest: list[str]
) -> None:
    assert arguments(words) == (release, rest)


def test_a_release_that_is_not_carried_is_refused() -> None:
    with pytest.raises(UnknownReleaseError):
        arguments(["--release", "0.1"])


def test_each_file_is_in_one_share_and_the_shares_are_alike(tmp_path: Path) -> None:
    sizes = {"a": 9, "b": 5, "c": 4, "d": 4, "e": 1, "f": 1}
    files = [tmp_path / name for name in sizes]
    for file in files:
        file.write_bytes(b"#" * sizes[file.name])
    shares = split(files, 2)
    assert sorted(chain(*shares)) == sorted(map(str, files))
    assert [sum(Path(file).stat().st_size for file in share) for share in shares] == [13, 11]
    assert split(reversed(files), 2) == shares
    assert split(files[:1], 2) == [[str(files[0])]]


class Started:
    """What stands in for the environment, and notes what pytest was started with."""

    def __init__(self, *codes: int) -> None:
        self.codes = list(codes)
        self.words: list[list[str]] = []
        self.installed: list[object] = []

    def __call__(self, release: str) -> Started:
        self.release = release
        return self

    def make(self) -> Started:
        return self

    def install(self, wheel: object) -> None:
        self.installed.append(wheel)

    def pytest(self, _: object, words: list[str], *, stream: bool) -> Finished:
        self.words.append(words)
        return Finished([], self.codes.pop(), "", "")

    def forks(self, _: object, runs: Sequence[Fork], *, timeout: float) -> list[Finished]:
        assert all(run.shadow is None for run in runs)
        self.words += (_files(run.arguments) for run in runs)
        return [
            Finished([], code, f"[says {code}]\n", "")
            for _, code in zip(runs, self.codes, strict=True)
        ]


def _files(arguments: Sequence[str]) -> list[str]:
    """Return the test files among the words of pytest."""
    return [word for word in arguments if Path(word).name.startswith("test_")]


def run(monkeypatch: pytest.MonkeyPatch, started: Started, *words: str) -> None:
    monkeypatch.setattr(command, "Environment", started)
    monkeypatch.setattr(command, "patched_wheel", lambda release: f"wheel of {release}")
    monkeypatch.setattr(command, "start_pytest", started.pytest)
    monkeypatch.setattr(command, "run_in_forks", started.forks)
    monkeypatch.setattr(command, "SHARES", 2)
    monkeypatch.setattr(sys, "argv", ["tests", *words])
    command.main()


def test_without_words_every_file_runs_once_and_each_process_is_heard(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = Started(0, 0)
    run(monkeypatch, started, "--release", "0.33.0")
    assert (started.release, started.installed) == ("0.33.0", ["wheel of 0.33.0"])
    assert len(started.words) == 2
    every = sorted(map(str, command.OVERLAY_TESTS.rglob("test_*.py")))
    assert sorted(chain(*started.words)) == every
    assert capsys.readouterr().out == "[says 0]\n" * 2


@pytest.mark.parametrize("codes", [(0, 1), (1, 0), (0, -9)])
def test_one_that_fails_fails_all(
    codes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CheckFailedError) as caught:
        run(monkeypatch, Started(*codes), "--release", "0.33.0")
    assert "nox -s tests -- --release 0.33.0 tests/overlay -x" in caught.value.next_step
    assert caught.value.found == f"pytest exited with {sum(codes)}"
    said = capsys.readouterr().out
    assert all(f"[says {code}]\n" in said for code in codes)


def test_with_words_there_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started = Started(1)
    with pytest.raises(CheckFailedError) as caught:
        run(monkeypatch, started, "tests/overlay", "-k", "a b")
    assert started.words == [[OVERLAY, "-k", "a b"]]
    assert caught.value.next_step.endswith("nox -s tests -- tests/overlay -k 'a b' -x")

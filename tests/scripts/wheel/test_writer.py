from __future__ import annotations

import base64
import csv
import errno
import hashlib
import io
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
import zlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scripts.project import ROOT
from scripts.system.errors import CheckFailedError
from scripts.wheel import writer
from scripts.wheel.reader import WheelReader
from scripts.wheel.writer import first_difference, write_wheel
from tests.scripts.wheels import (
    NATIVE,
    NOT_COPIED,
    ODD_NAME,
    SCRIPT,
    TAGS,
    WORKER,
    Changes,
    opened,
    stock_files,
    stock_wheel_file,
    with_metadata,
    write,
    zip_bytes,
)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    folder = tmp_path / "dist"
    folder.mkdir()
    return folder


def assert_sound(stock: WheelReader, changes: Changes, target: Path) -> None:
    """Check a result without the code under test, but for finding raw bytes in it."""
    expected = changes.expected(stock)
    own = f"{changes.dist_info}/RECORD"
    with zipfile.ZipFile(target) as archive:
        assert archive.testzip() is None
        content = {name: archive.read(name) for name in archive.namelist()}
    record = content.pop(own)
    assert content == expected
    rows = list(csv.reader(io.StringIO(record.decode(), newline="")))
    assert [row[0] for row in rows] == [*(n for n in content if not n.endswith("/")), own]
    assert rows[-1] == [own, "", ""]
    for name, stated, size in rows[:-1]:
        digest = base64.urlsafe_b64encode(hashlib.sha256(content[name]).digest()).decode()
        assert (stated, size) == (f"sha256={digest.rstrip('=')}", str(len(content[name])))

    with WheelReader(target) as patched:
        for name, member in stock.members.items():
            if name in changes.replaced or name.endswith(NOT_COPIED):
                continue
            copy = patched.members[name.replace(f"{stock.dist_info}/", f"{changes.dist_info}/")]
            raw = (stock.raw(member.data, member.end), patched.raw(copy.data, copy.end))
            assert raw[0] == raw[1], name
            if copy.name == name:  # its local header as well
                header = patched.raw(copy.start, copy.data)
                assert header == stock.raw(member.start, member.data)
            for field in zipfile.ZipInfo.__slots__:
                if field not in _OWN_FIELDS:
                    assert getattr(copy.info, field, 0) == getattr(member.info, field, 0), field


_OWN_FIELDS = {"filename", "orig_filename", "header_offset", "_end_offset"}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("zip64", [False, True])
def test_the_result_is_the_source_with_the_changes(
    tmp_path: Path, out: Path, streamed: bool, zip64: bool
) -> None:
    with opened(stock_wheel_file(tmp_path, streamed=streamed, zip64=zip64)) as (stock, changes):
        target = write(stock, changes, out)
        assert target.name == f"vllm-0.20.2+kvfix.0.1.0-{TAGS}.whl"
        assert_sound(stock, changes, target)
        with WheelReader(target) as patched:
            assert str(patched.version) == "0.20.2+kvfix.0.1.0"
            assert patched.dist_info == "vllm-0.20.2+kvfix.0.1.0.dist-info"
            assert patched.names[-1] == "vllm-0.20.2+kvfix.0.1.0.dist-info/RECORD"
            assert patched.comment == stock.comment
            first_metadata = next(n for n in patched.names if n.startswith(patched.dist_info))
            assert patched.names.index("vllm_overlay/worker.py") < patched.names.index(
                first_metadata
            )
            modes = {n: m.info.external_attr >> 16 for n, m in patched.members.items()}
            assert modes[NATIVE] == modes[SCRIPT] == 0o100755
            assert modes[WORKER] == 0o100640  # kept, though it is not the usual one
            assert modes["vllm_overlay/worker.py"] == 0o100644
            assert modes["vllm/data/"] == 0o40755
            dates = {member.info.date_time for member in patched.members.values()}
            assert dates == {stock.members[NATIVE].info.date_time}
            assert patched.members[ODD_NAME].info.flag_bits & 0x800
    result = subprocess.run([sys.executable, "-m", "zipfile", "-t", target], check=False)
    assert result.returncode == 0
    assert list(out.iterdir()) == [target]


def test_an_in_house_build_keeps_its_own_version_and_name(tmp_path: Path, out: Path) -> None:
    path = stock_wheel_file(tmp_path, name="vllm-cpu", version="0.20.2+cu129")
    with opened(path) as (stock, changes):
        target = write(stock, changes, out)
        assert target.name == f"vllm_cpu-0.20.2+cu129.kvfix.0.1.0-{TAGS}.whl"
        assert_sound(stock, changes, target)


def test_what_is_not_changed_is_never_inflated(tmp_path: Path, out: Path) -> None:
    content = zip_bytes(with_metadata(stock_files()))
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        info = archive.getinfo(NATIVE)
    at = info.header_offset + 30 + len(NATIVE)
    damaged = content[:at] + bytes(100) + content[at + 100 :]
    path = tmp_path / f"vllm-0.20.2-{TAGS}.whl"
    path.write_bytes(damaged)
    with opened(path) as (stock, changes), pytest.raises(zlib.error):
        with WheelReader(write(stock, changes, out)) as patched:
            copy = patched.members[NATIVE]
            raw = patched.raw(copy.data, copy.data_end)
        assert raw == damaged[at : at + info.compress_size]
        zlib.decompress(raw, wbits=-15)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (0x20, 0o100644 << 16),
        (0x8000, 0o100644 << 16),  # the highest bit of those that are DOS's
        (1 << 16, 1 << 16),  # the lowest of those that are not
    ],
)
def test_a_member_without_permission_bits_gets_the_usual_ones(
    tmp_path: Path, out: Path, before: int, after: int
) -> None:
    path = stock_wheel_file(tmp_path)
    content = path.read_bytes()
    at = content.rindex(WORKER.encode()) - 8  # external attributes, then the offset, then the name
    path.write_bytes(content[:at] + before.to_bytes(4, "little") + content[at + 4 :])
    with opened(path) as (stock, changes):
        assert stock.members[WORKER].info.external_attr == before
        with WheelReader(write(stock, changes, out)) as patched:
            assert patched.members[WORKER].info.external_attr == after


@pytest.mark.parametrize(
    "order",
    [
        ["RECORD", "vllm/__init__.py", "RECORD.jws", "METADATA"],
        [NATIVE, "RECORD", "vllm/__init__.py", "METADATA", ODD_NAME, "RECORD.p7s", SCRIPT],
        ["vllm/empty.py", "WHEEL", "vllm/data/", WORKER, "vllm/__init__.py"],
    ],
)
def test_a_source_may_have_its_members_in_any_order(
    tmp_path: Path, out: Path, order: list[str]
) -> None:
    folder = "vllm-0.20.2.dist-info"
    files = with_metadata(stock_files())
    files |= {f"{folder}/{signature}": b"signed" for signature in ("RECORD.jws", "RECORD.p7s")}
    first = [name if "/" in name else f"{folder}/{name}" for name in order]
    ordered = {name: files.pop(name) for name in first} | files
    path = tmp_path / f"vllm-0.20.2-{TAGS}.whl"
    path.write_bytes(zip_bytes(ordered))
    with opened(path) as (stock, changes):
        assert list(stock.members) == list(ordered)
        target = write(stock, changes, out)
        assert_sound(stock, changes, target)
    kept = [name for name in ordered if not name.startswith(f"{folder}/")]
    with WheelReader(target) as patched:
        assert list(patched.members)[: len(kept)] == kept


def test_what_is_only_called_like_the_metadata_folder_is_no_metadata(
    tmp_path: Path, out: Path
) -> None:
    old = "vllm-0.20.2.dist-info-not/a.py"
    path = stock_wheel_file(tmp_path, {**stock_files(), old: b"a"})
    with opened(path) as (stock, changes):
        new = f"{changes.dist_info}-not/b.py"
        changes.added[new] = b"b"
        target = write(stock, changes, out)
        assert_sound(stock, changes, target)
        body = [name for name in stock.members if not name.startswith(f"{stock.dist_info}/")]
    assert body[-1] == old
    body += [new, "vllm_overlay/__init__.py", "vllm_overlay/worker.py"]
    with WheelReader(target) as patched:
        metadata = list(patched.members)[len(body) :]
        assert list(patched.members)[: len(body)] == body
    assert all(name.startswith(f"{changes.dist_info}/") for name in metadata)


def test_signatures_of_the_old_record_are_left_out(tmp_path: Path, out: Path) -> None:
    files = with_metadata(stock_files())
    for signature in ("RECORD.jws", "RECORD.p7s"):
        files[f"vllm-0.20.2.dist-info/{signature}"] = b"signed"
    path = tmp_path / f"vllm-0.20.2-{TAGS}.whl"
    path.write_bytes(zip_bytes(files))
    with opened(path) as (stock, changes), WheelReader(write(stock, changes, out)) as patched:
        left = [name for name in patched.names if "RECORD" in name]
        assert left == [f"{changes.dist_info}/RECORD"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"replaced": {"vllm/nowhere.py": b""}},
        {"replaced": {"vllm-0.20.2.dist-info/RECORD": b""}},
        {"replaced": {"vllm/data/": b""}},
        {"added": {WORKER: b""}},
        {"added": {"vllm-0.20.2+x.dist-info/RECORD": b""}},
        {"added": {"vllm-0.20.2+x.dist-info/WHEEL": b""}},
    ],
)
def test_a_change_that_makes_no_sense_is_refused(
    tmp_path: Path, out: Path, wrong: dict[str, dict[str, bytes]]
) -> None:
    with WheelReader(stock_wheel_file(tmp_path)) as stock:
        arguments = {"replaced": {}, "added": {}, **wrong}
        with pytest.raises(ValueError, match="cannot replace or add"):
            write_wheel(stock, out / "x.whl", dist_info="vllm-0.20.2+x.dist-info", **arguments)
    assert list(out.iterdir()) == []


def test_a_source_that_shrinks_meanwhile_leaves_the_old_wheel(tmp_path: Path, out: Path) -> None:
    path = stock_wheel_file(tmp_path)
    with opened(path) as (stock, changes):
        target = out / changes.file_name
        target.write_bytes(b"old")
        os.truncate(path, 5000)
        with pytest.raises(Exception, match="became shorter"):
            write(stock, changes, out)
        assert target.read_bytes() == b"old"
        assert list(out.iterdir()) == [target]


def test_a_result_that_does_not_read_back_never_gets_its_name(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a disk that stores other bytes than it was given."""
    write_bytes = writer._Output._write

    def spoiled(output: writer._Output, data: bytes) -> None:
        write_bytes(output, data.replace(b"return 2", b"return 3"))

    with opened(stock_wheel_file(tmp_path)) as (stock, changes):
        target = out / changes.file_name
        target.write_bytes(b"old")
        monkeypatch.setattr(writer._Output, "_write", spoiled)
        with pytest.raises(CheckFailedError, match="cannot be read: Bad CRC"):
            write(stock, changes, out)
    assert target.read_bytes() == b"old"
    assert list(out.iterdir()) == [target]


def test_a_disk_that_fails_while_the_result_is_read_back_is_noticed(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = [OSError(errno.EIO, "it fails")]
    sync = os.fsync

    def once(descriptor: int) -> None:
        if faults:  # Linux reports a fault once: the next call is one that succeeds
            raise faults.pop()
        sync(descriptor)

    with opened(stock_wheel_file(tmp_path)) as (stock, changes):
        target = out / changes.file_name
        target.write_bytes(b"old")
        monkeypatch.setattr(os, "fsync", once)
        with pytest.raises(OSError, match="it fails"):
            write(stock, changes, out)
    assert target.read_bytes() == b"old"
    assert list(out.iterdir()) == [target]


def test_the_first_byte_that_would_be_written_otherwise_is_named(tmp_path: Path, out: Path) -> None:
    with opened(stock_wheel_file(tmp_path)) as (stock, changes):
        target = write(stock, changes, out)
        sound = target.read_bytes()

        def difference(content: bytes) -> int | None:
            target.write_bytes(content)
            return first_difference(
                stock,
                target,
                dist_info=changes.dist_info,
                replaced=changes.replaced,
                added=changes.added,
            )

        assert difference(sound) is None
        assert difference(sound + b"\0") == len(sound)
        for at in (0, 1, sound.index(b"return 2"), *range(2, len(sound), 9973), len(sound) - 1):
            other = bytes([sound[at] ^ 1])
            assert difference(sound[:at] + other + sound[at + 1 :]) == at
            assert difference(sound[:at] + other + bytes(len(sound))) == at  # whatever follows
            assert difference(sound[:at]) == at


_BUILD = """
import os, sys, time
from pathlib import Path
os.umask(int(sys.argv[3], 8))
from tests.scripts.wheels import opened, write
with opened(Path(sys.argv[1])) as (stock, changes):
    print(write(stock, changes, Path(sys.argv[2])))
"""


def start_build(
    source: Path, folder: Path, umask: str = "022", **env: str
) -> subprocess.Popen[str]:
    command: list[str | Path] = [sys.executable, "-c", _BUILD, source, folder, umask]
    return subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, **env}, stdout=subprocess.PIPE, text=True
    )


def test_the_same_bytes_in_another_folder_umask_zone_and_process(tmp_path: Path) -> None:
    results = []
    for number, umask in enumerate(("000", "077")):
        source = tmp_path / f"source {number}"
        folder = tmp_path / f"dist {number}"
        source.mkdir()
        folder.mkdir()
        path = stock_wheel_file(source)
        os.utime(path, (number * 1e9, number * 1e9))
        zone = ("UTC", "Pacific/Kiritimati")[number]
        with start_build(path, folder, umask, TZ=zone, PYTHONHASHSEED=str(number)) as process:
            built, _ = process.communicate()
        assert process.returncode == 0
        target = Path(built.strip())
        results.append((target.read_bytes(), target.name, target.stat().st_mode))
    assert results[0] == results[1]


def test_a_kill_at_any_moment_leaves_the_old_wheel_or_the_whole_new_one(
    tmp_path: Path, out: Path
) -> None:
    source = tmp_path / f"vllm-0.20.2-{TAGS}.whl"
    files = {**stock_files(), "vllm/big.so": bytes(60_000_000)}
    source.write_bytes(zip_bytes(with_metadata(files), stored=True))
    times = []
    for _ in range(2):  # the first one may have to read all it imports from a disk
        start = time.monotonic()
        with start_build(source, out) as process:
            process.communicate()
        times.append(time.monotonic() - start)
    whole_time = min(times)
    (target,) = out.iterdir()
    new = hashlib.sha256(target.read_bytes()).digest()
    old = hashlib.sha256(b"old").digest()

    seen = set()
    for step in range(10):
        target.write_bytes(b"old")
        with start_build(source, out) as process:
            # Mostly in its last part: importing comes first and writes nothing.
            time.sleep(whole_time * (0.3 + step / 12))
            process.send_signal(signal.SIGKILL)
        (wheel,) = (path for path in out.iterdir() if path.suffix == ".whl")
        assert wheel == target
        found = hashlib.sha256(wheel.read_bytes()).digest()
        assert found in (old, new)
        seen.add(found)
    assert old in seen
    with start_build(source, out) as process:
        process.communicate()
    assert list(out.iterdir()) == [target]
    assert hashlib.sha256(target.read_bytes()).digest() == new


PATHS = st.lists(
    st.text("abcXYZ09_é ,\"'#+", min_size=1, max_size=6).filter(lambda part: part.strip()),
    min_size=1,
    max_size=3,
).map("/".join)


def no_file_is_a_folder(files: dict[str, bytes]) -> bool:
    return not any(other.startswith(f"{name}/") for name in files for other in files)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    files=st.dictionaries(PATHS.map("vllm/{}".format), st.binary(max_size=300), max_size=12).filter(
        no_file_is_a_folder
    ),
    added=st.dictionaries(
        PATHS.map("vllm_overlay/{}".format), st.binary(max_size=50), max_size=3
    ).filter(no_file_is_a_folder),
    streamed=st.booleans(),
    zip64=st.booleans(),
    data=st.data(),
)
def test_any_set_of_files_survives(
    tmp_path: Path,
    files: dict[str, bytes],
    added: dict[str, bytes],
    streamed: bool,
    zip64: bool,
    data: st.DataObject,
) -> None:
    chosen = data.draw(st.sets(st.sampled_from(sorted(files)))) if files else set()
    path = stock_wheel_file(tmp_path, files, streamed=streamed, zip64=zip64)
    with opened(path) as (stock, changes):
        changes.replaced |= {name: data.draw(st.binary(max_size=200)) for name in sorted(chosen)}
        changes.added |= added
        assert_sound(stock, changes, write(stock, changes, tmp_path))


def installers() -> list[list[str]]:
    uv = shutil.which(
        "uv", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    )
    pip = [sys.executable, "-m", "pip", "--isolated", "--disable-pip-version-check"]
    return [pip, [uv or "uv", "pip"]]


@pytest.mark.parametrize("installer", installers(), ids=["pip", "uv"])
def test_the_result_installs(tmp_path: Path, out: Path, installer: list[str]) -> None:
    source = stock_wheel_file(tmp_path, tags="py3-none-any")
    site = tmp_path / "site"
    with opened(source) as (stock, changes):
        target = write(stock, changes, out)
        options = ["install", "--no-deps", "--no-index", "--target", str(site), str(target)]
        result = subprocess.run([*installer, *options], check=False, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        for name, content in changes.expected(stock).items():
            if not name.endswith("/"):
                assert (site / name).read_bytes() == content
    assert os.access(site / SCRIPT, os.X_OK)
    code = (
        "import importlib.metadata as m, vllm, vllm_overlay.worker, vllm.worker\n"
        "assert vllm.__version__ == m.version('vllm') == '0.20.2+kvfix.0.1.0'\n"
        "assert vllm.worker.work() == 2\n"
        # pip moves the commands of a --target elsewhere than it notes.
        "assert all(f.locate().exists() for f in m.files('vllm') if '..' not in f.parts)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=site)

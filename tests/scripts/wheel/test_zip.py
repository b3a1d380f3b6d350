from __future__ import annotations

import io
import struct
import zipfile
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.wheel import zip as zip_module
from scripts.wheel.zip import (
    central_directory,
    descriptor_size,
    local_agrees,
    local_size,
    renamed_local_header,
    stored_member,
)
from tests.scripts.hostile.wheels import Entry, pack

LIKE = zipfile.ZipInfo("x", (2026, 5, 8, 20, 9, 8))
MAX_32 = 0xFFFFFFFF
UNKNOWN = b"\xfe\xca\x02\x00hi"  # an extra field of a kind that nobody knows


def infos_of(content: bytes) -> list[zipfile.ZipInfo]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return archive.infolist()


def local_header(entry: Entry) -> tuple[bytes, zipfile.ZipInfo]:
    """Return the local header of a member, and what the directory says of it."""
    content = pack([entry])
    (info,) = infos_of(content)
    return content[: local_size(content)], info


def test_a_member_beyond_four_gibibytes_is_found_by_zipfile(tmp_path: Path) -> None:
    path, offset = tmp_path / "sparse.zip", 5 << 30
    info, header = stored_member("a/b", b"data", zlib.crc32(b"data"), like=LIKE, attributes=1 << 16)
    with path.open("wb") as file:
        file.seek(offset)
        file.write(header + b"data")
        end = file.tell()
        file.write(central_directory([(info, "a/b", offset)], end, b"comment"))
    with zipfile.ZipFile(path) as archive:
        assert archive.comment == b"comment"
        assert archive.start_dir == end
        (found,) = archive.infolist()
        assert found.header_offset == offset
        assert found.date_time == LIKE.date_time
        assert found.extract_version == 45
        assert archive.read(found) == b"data"


def test_sizes_beyond_four_gibibytes_and_other_extra_fields_are_kept(tmp_path: Path) -> None:
    info, _ = stored_member("huge", b"", 0, like=LIKE, attributes=1 << 16)
    info.file_size, info.compress_size = 7 << 30, 6 << 30
    unknown = b"\xfe\xca\x02\x00hi"
    info.extra = b"\x01\x00\x08\x00" + bytes(8) + unknown  # a zip64 field that no longer holds
    path = tmp_path / "directory.zip"
    path.write_bytes(central_directory([(info, "huge", 0)], 0, b""))
    with zipfile.ZipFile(path) as archive:
        (found,) = archive.infolist()
    assert (found.file_size, found.compress_size) == (7 << 30, 6 << 30)
    assert found.extra == b"\x01\x00\x10\x00" + struct.pack("<2Q", 7 << 30, 6 << 30) + unknown


def test_more_members_than_sixteen_bits_count(tmp_path: Path) -> None:
    info, _ = stored_member("x", b"", 0, like=LIKE, attributes=1 << 16)
    path = tmp_path / "many.zip"
    path.write_bytes(central_directory([(info, f"{n:x}", 0) for n in range(70_000)], 0, b""))
    with zipfile.ZipFile(path) as archive:
        assert len(archive.infolist()) == 70_000
        assert archive.infolist()[-1].filename == f"{69_999:x}"


def test_stored_members_are_written_byte_for_byte_as_zipfile_writes_them() -> None:
    members = {"a/b.py": (b"data", 0o100644), "größe": (b"", 0o100600), "c.sh": (b"x", 0o100755)}
    buffer, body, entries = io.BytesIO(), b"", []
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.comment = b"comment"
        for name, (data, mode) in members.items():
            theirs = zipfile.ZipInfo(name, LIKE.date_time)
            theirs.external_attr = mode << 16
            archive.writestr(theirs, data)
            ours, header = stored_member(
                name, data, zlib.crc32(data), like=LIKE, attributes=mode << 16
            )
            entries.append((ours, name, len(body)))
            body += header + data
    assert body + central_directory(entries, len(body), b"comment") == buffer.getvalue()


def test_a_copied_record_keeps_every_field() -> None:
    entries = [
        Entry(b"all", b"data" * 9, comment=b"note", extra=UNKNOWN, internal=1, system=0),
        Entry(b"newer", mode=0o100755, version=63, lies={"reserved": 7}),
        Entry("größe".encode("cp437"), flags=8),
        Entry("größe".encode(), flags=0x800 | 6, comment=b"another"),
        Entry(b"stored", b"data", method=0),
    ]
    content = pack(entries, b"comment")
    copied = [(info, info.filename, info.header_offset) for info in infos_of(content)]
    start = content.index(b"PK\1\2")
    assert central_directory(copied, start, b"comment") == content[start:]


@pytest.mark.parametrize(
    ("extra", "kept"),
    [
        (b"\1\0\x08\0" + bytes(8) + UNKNOWN, UNKNOWN),
        (UNKNOWN + b"\1\0\x08\0" + bytes(8), UNKNOWN),
        (UNKNOWN + b"\xff\xca\0\0", UNKNOWN + b"\xff\xca\0\0"),
        (UNKNOWN + b"abc", UNKNOWN),  # too short for a field
    ],
)
def test_every_extra_field_but_that_of_zip64_is_kept(extra: bytes, kept: bytes) -> None:
    info, _ = stored_member("x", b"", 0, like=LIKE, attributes=1 << 16)
    info.extra = extra
    (found,) = infos_of(central_directory([(info, "x", 0)], 0, b""))
    assert found.extra == kept


@pytest.mark.parametrize(
    ("size", "packed", "offset", "wide"),
    [
        (MAX_32 - 1, MAX_32 - 1, MAX_32 - 1, []),
        (MAX_32, 5, 6, [MAX_32]),
        (5, MAX_32, 6, [MAX_32]),
        (5, 6, MAX_32, [MAX_32]),
        (7 << 30, 6 << 30, 5 << 30, [7 << 30, 6 << 30, 5 << 30]),
    ],
)
@pytest.mark.parametrize("version", [20, 63])
def test_what_32_bits_do_not_hold_stands_in_the_field_of_zip64(
    size: int, packed: int, offset: int, wide: list[int], version: int
) -> None:
    info, _ = stored_member("x", b"", 0, like=LIKE, attributes=1 << 16)
    info.file_size, info.compress_size, info.extract_version = size, packed, version
    (found,) = infos_of(central_directory([(info, "x", offset)], 0, b""))
    assert (found.file_size, found.compress_size, found.header_offset) == (size, packed, offset)
    field = struct.pack(f"<2H{len(wide)}Q", 1, 8 * len(wide), *wide)
    assert found.extra == (field if wide else b"")
    assert found.extract_version == (max(version, 45) if wide else version)


def end_records(count: int, size: int, start: int, *, zip64: bool, limit: int = MAX_32) -> bytes:
    """Return what stands behind a directory by sections 4.3.14 to 4.3.16 of APPNOTE.TXT."""
    wide = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, start)
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, start + size, 1)
    few, short = min(count, 0xFFFF), (min(size, limit), min(start, limit))
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, few, few, *short, 7) + b"comment"
    return wide + locator + end if zip64 else end


@pytest.mark.parametrize(
    ("count", "start", "zip64"),
    [
        (2, MAX_32 - 1, False),
        (2, MAX_32, True),
        (2, 5 << 30, True),
        (0xFFFE, 100, False),
        (0xFFFF, 100, True),
        (0x10000, 100, True),
    ],
)
def test_the_end_is_written_in_64_bits_where_a_field_of_it_needs_them(
    count: int, start: int, zip64: bool
) -> None:
    info, _ = stored_member("x", b"", 0, like=LIKE, attributes=1 << 16)
    content = central_directory([(info, "x", 0)] * count, start, b"comment")
    size = count * (46 + len("x"))
    assert content[size:] == end_records(count, size, start, zip64=zip64)


@pytest.mark.parametrize(("limit", "zip64"), [(95, False), (94, True), (93, True)])
def test_a_directory_larger_than_its_field_has_an_end_in_64_bits(
    monkeypatch: pytest.MonkeyPatch, limit: int, zip64: bool
) -> None:
    """With a smaller field, for the real one is larger than memory."""
    info, _ = stored_member("x", b"", 0, like=LIKE, attributes=1 << 16)
    monkeypatch.setattr(zip_module, "_MAX_32", limit)
    content = central_directory([(info, "x", 0)] * 2, 0, b"comment")
    assert content[94:] == end_records(2, 94, 0, zip64=zip64, limit=limit)


@pytest.mark.parametrize("flags", [0, 6, 8, 0x800, 0x808])
@pytest.mark.parametrize("new", ["b", "größer/als.py"])
def test_a_local_header_is_renamed_and_nothing_else_of_it_changes(flags: int, new: str) -> None:
    encoding = "utf-8" if flags & 0x800 else "cp437"
    name = "vllm/größe.py".encode(encoding)
    entry = Entry(name, b"data", flags=flags, local_extra=UNKNOWN, version=45)
    header, info = local_header(entry)
    assert renamed_local_header(header, info, info.filename) == header
    entry.name = new.encode(encoding)
    assert renamed_local_header(header, info, new) == local_header(entry)[0]


# By PKWARE's numbers: encrypted, sizes behind the data, strongly encrypted, UTF-8, hidden.
FLAGS_THAT_MATTER = {0, 3, 6, 11, 13}


@pytest.mark.parametrize("bit", range(16))
def test_the_flags_that_change_what_is_read_have_to_agree(bit: int) -> None:
    flag = 1 << bit
    assert local_agrees(*local_header(Entry(b"a", b"data", flags=flag)))
    for flags, local_flags in ((flag, 0), (0, flag)):
        header = local_header(Entry(b"a", b"data", flags=flags, local_flags=local_flags))
        assert local_agrees(*header) == (bit not in FLAGS_THAT_MATTER)


@pytest.mark.parametrize("bit", range(16))
@pytest.mark.parametrize("field", ["crc", "packed", "size"])
def test_only_a_streamed_member_may_state_its_sizes_later(bit: int, field: str) -> None:
    entry = Entry(b"a", b"data", flags=1 << bit, lies={f"local_{field}": 0})
    assert local_agrees(*local_header(entry)) == (bit == 3)


WHOLE = Entry(b"a", b"data" * 9)


@pytest.mark.parametrize(
    ("entry", "agrees"),
    [
        (WHOLE, True),
        (replace(WHOLE, local_name=b"b"), False),
        (replace(WHOLE, local_name=b"ab"), False),
        (replace(WHOLE, lies={"local_method": 0}), False),
        (replace(WHOLE, lies={"local_crc": 1}), False),
        (replace(WHOLE, lies={"local_packed": 1}), False),
        (replace(WHOLE, lies={"local_size": 1}), False),
        (replace(WHOLE, local_extra=UNKNOWN), True),
        (replace(WHOLE, local_extra=UNKNOWN + b"\x75\x70\0\0"), False),  # its name in Unicode
        (replace(WHOLE, local_extra=UNKNOWN + b"\x75\x70\0\0", flags=8), False),
        (replace(WHOLE, local_extra=b"\x74\x70\0\0" + b"\x76\x70\0\0"), True),
    ],
)
def test_a_local_header_that_says_something_else_is_found_out(entry: Entry, agrees: bool) -> None:
    header, info = local_header(entry)
    assert local_agrees(header, info) == agrees
    assert not local_agrees(b"PK\3\5" + header[4:], info)  # no local header at all


@pytest.mark.parametrize("said", [("packed",), ("size",), ("packed", "size")])
def test_the_sizes_of_a_local_header_may_stand_in_its_zip64_field(said: tuple[str, ...]) -> None:
    size, packed = len(WHOLE.data), infos_of(pack([WHOLE]))[0].compress_size
    field = struct.pack("<2H2Q", 1, 16, size, packed)
    wide = replace(WHOLE, lies={f"local_{which}": MAX_32 for which in said})
    assert local_agrees(*local_header(replace(wide, local_extra=field)))
    for wrong in (b"", UNKNOWN, struct.pack("<2H2Q", 1, 16, packed, size), field[:-1] + b"\1"):
        assert not local_agrees(*local_header(replace(wide, local_extra=wrong)))


def test_a_zip64_field_counts_only_where_a_size_refers_to_it() -> None:
    field = struct.pack("<2H2Q", 1, 16, 7, 8)
    assert local_agrees(*local_header(replace(WHOLE, local_extra=field)))
    entry = replace(WHOLE, local_extra=field, lies={"local_size": MAX_32 - 1})
    assert not local_agrees(*local_header(entry))


@pytest.mark.parametrize("signature", [b"PK\7\x08", b""])
@pytest.mark.parametrize("form", ["<3L", "<L2Q"])
@pytest.mark.parametrize("values", [(0, 0, 0), (7, 8, 9), (1 << 31, MAX_32, 1)])
@pytest.mark.parametrize("following", [b"PK\1\2", b"PK\3\4\x14" + bytes(20)])
def test_a_data_descriptor_is_found_in_each_of_its_forms(
    signature: bytes, form: str, values: tuple[int, int, int], following: bytes
) -> None:
    info = zipfile.ZipInfo("a")
    info.CRC, info.compress_size, info.file_size = values
    descriptor = signature + struct.pack(form, *values)
    assert descriptor_size(info, descriptor + following) == len(descriptor)


@pytest.mark.parametrize("signature", [b"PK\7\x08", b""])
@pytest.mark.parametrize("form", ["<3L", "<L2Q"])
@pytest.mark.parametrize("values", [(8, 7, 9), (7, 9, 8), (6, 8, 9), (7, 8, 10)])
def test_a_data_descriptor_of_other_values_is_none(
    signature: bytes, form: str, values: tuple[int, int, int]
) -> None:
    info = zipfile.ZipInfo("a")
    info.CRC, info.compress_size, info.file_size = 7, 8, 9
    assert descriptor_size(info, signature + struct.pack(form, *values) + b"PK\1\2") == 0


def test_only_the_longer_descriptor_holds_sizes_beyond_32_bits() -> None:
    info = zipfile.ZipInfo("a")
    info.CRC, info.compress_size, info.file_size = 7, 5 << 30, 6 << 30
    descriptor = struct.pack("<L2Q", 7, 5 << 30, 6 << 30)
    assert descriptor_size(info, b"PK\7\x08" + descriptor) == 24
    assert descriptor_size(info, descriptor) == 20
    assert descriptor_size(info, b"") == 0

from __future__ import annotations

import struct
import zipfile
import zlib
from pathlib import Path

from scripts.wheel.zip import central_directory, stored_member

LIKE = zipfile.ZipInfo("x", (2026, 5, 8, 20, 9, 8))


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

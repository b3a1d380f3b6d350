"""The zip format below `zipfile`: where a member's bytes lie, and a directory for copied ones.

`zipfile` reads central directories well, zip64 included, and that part is left to it. Writing one
for members that it has not compressed itself is not what it is made for: `ZipFile.close` encodes
names anew, raises version fields and drops extra fields, each in a way that differs between
Python releases, while the local headers copied beside them keep what they said. So the directory
is packed here, and a copied member's record keeps each field but the name and the offset.

Layouts and names of fields: PKWARE's APPNOTE.TXT 6.3.10, sections 4.3.7 to 4.3.16 and 4.5.3.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final
from zipfile import ZIP_STORED, ZipInfo

LOCAL_HEADER: Final = struct.Struct("<4s5H3L2H")
_CENTRAL_RECORD: Final = struct.Struct("<4s4B4H3L5H2L")
_END64: Final = struct.Struct("<4sQ2H2L4Q")
_END64_LOCATOR: Final = struct.Struct("<4sLQL")
_END: Final = struct.Struct("<4s4H2LH")
_EXTRA: Final = struct.Struct("<2H")

_NAME_LENGTH: Final = slice(26, 28)  # of a local header
STREAMED: Final = 0x8  # flag bits
_UTF8: Final = 0x800
_AGREED: Final = STREAMED | _UTF8 | 0x2041  # and what says that it is encrypted, or a header is
_ZIP64_EXTRA: Final = 1  # kinds of extra fields
_OTHER_NAME: Final = 0x7075
_VERSION: Final = 20  # of the format, that a reader of a plain member needs
_VERSION_ZIP64: Final = 45
_UNIX: Final = 3  # the system whose permission bits `external_attr` holds
_MAX_32: Final = 0xFFFFFFFF  # this value itself means: look into the zip64 field
_MAX_16: Final = 0xFFFF


@dataclass(frozen=True)
class Member:
    """One member of a zip file and where it lies, in bytes from the start of the file.

    The local header is at `start`, the compressed data at `data`, `info.compress_size` bytes
    long, and a data descriptor, where there is one, between them and `end`.
    """

    info: ZipInfo
    start: int
    data: int
    end: int

    @property
    def name(self) -> str:
        """Path inside the zip file."""
        return self.info.filename

    @property
    def data_end(self) -> int:
        """Offset of the first byte behind the compressed data."""
        return self.data + self.info.compress_size


def local_size(header: bytes) -> int:
    """Return the length of a whole local header, given its first 30 bytes or more."""
    name_length, extra_length = LOCAL_HEADER.unpack_from(header)[-2:]
    return LOCAL_HEADER.size + int(name_length) + int(extra_length)


def local_agrees(header: bytes, info: ZipInfo) -> bool:
    """Whether a whole local header says of its member what the central directory says.

    Installers that stream a wheel go by the one, installers that seek in it by the other: where
    the two differ, one wheel would install as two.
    """
    fields = LOCAL_HEADER.unpack_from(header)
    signature, _, flags, method, _, _, crc, packed, size, name_length, _ = fields
    end = LOCAL_HEADER.size + name_length
    if signature != b"PK\3\4" or header[LOCAL_HEADER.size : end] != _raw_name(info):
        return False
    if (flags & _AGREED, method) != (info.flag_bits & _AGREED, info.compress_type):
        return False
    extra = dict(_fields(header[end:]))
    if _OTHER_NAME in extra:
        return False
    if flags & STREAMED:
        return True
    if _MAX_32 in (packed, size):
        wide = struct.pack("<2Q", info.file_size, info.compress_size)
        if extra.get(_ZIP64_EXTRA) != wide:
            return False
        packed, size = info.compress_size, info.file_size
    return (crc, packed, size) == (info.CRC, info.compress_size, info.file_size)


def descriptor_size(info: ZipInfo, following: bytes) -> int:
    """Return the length of the data descriptor at the start of `following`; 0 where there is none.

    A member whose writer could not seek has one. The format allows four forms, with and without
    a signature, in 32 and in 64 bit, and nothing says which: the values themselves must match.
    """
    # The longer form first: of an empty member the shorter one is its beginning, while what
    # follows the shorter one, the signature of another record, never looks like the rest.
    for form in ("<L2Q", "<3L"):
        try:
            plain = struct.pack(form, info.CRC, info.compress_size, info.file_size)
        except struct.error:  # too large for 32 bit
            continue
        for descriptor in (b"PK\7\x08" + plain, plain):
            if following.startswith(descriptor):
                return len(descriptor)
    return 0


LONGEST_DESCRIPTOR: Final = 24


def renamed_local_header(header: bytes, info: ZipInfo, name: str) -> bytes:
    """Return a whole local header with another name, and everything else as it was."""
    new, old = _raw_name(info, name), _raw_name(info)
    return b"".join(
        (
            header[: _NAME_LENGTH.start],
            struct.pack("<H", len(new)),
            header[_NAME_LENGTH.stop : LOCAL_HEADER.size],
            new,
            header[LOCAL_HEADER.size + len(old) :],
        )
    )


def stored_member(
    name: str, data: bytes, crc: int, *, like: ZipInfo, attributes: int
) -> tuple[ZipInfo, bytes]:
    """Return the directory entry and the local header of a member that is not compressed.

    Args:
        name: Path inside the zip file.
        data: Content.
        crc: CRC-32 of `data`.
        like: The entry whose date the member takes.
        attributes: The external attributes: permission bits, shifted left by 16.
    """
    info = ZipInfo(name, like.date_time)
    info.compress_type = ZIP_STORED
    info.create_system = _UNIX
    info.create_version = info.extract_version = _VERSION
    info.flag_bits = 0 if name.isascii() else _UTF8
    info.external_attr = attributes
    info.CRC = crc
    info.file_size = info.compress_size = len(data)
    raw = _raw_name(info)
    header = LOCAL_HEADER.pack(
        b"PK\3\4",
        _VERSION,
        info.flag_bits,
        info.compress_type,
        *_dos_time(info),
        crc,
        len(data),
        len(data),
        len(raw),
        0,
    )
    return info, header + raw


def central_directory(
    entries: Sequence[tuple[ZipInfo, str, int]], start: int, comment: bytes
) -> bytes:
    """Return the central directory of a zip file and the end records behind it.

    Args:
        entries: Of each member its entry, its name and the offset of its local header.
        start: Where the directory will lie.
        comment: The comment of the whole file.
    """
    records = b"".join(_central_record(*entry) for entry in entries)
    count, size = len(entries), len(records)
    end64 = b""
    if count >= _MAX_16 or size >= _MAX_32 or start >= _MAX_32:
        end64 = _END64.pack(
            b"PK\6\6",
            _END64.size - 12,  # without the signature and this field
            _VERSION_ZIP64,
            _VERSION_ZIP64,
            0,
            0,
            count,
            count,
            size,
            start,
        ) + _END64_LOCATOR.pack(b"PK\6\7", 0, start + size, 1)
    few = min(count, _MAX_16)
    sizes = (min(size, _MAX_32), min(start, _MAX_32))
    return records + end64 + _END.pack(b"PK\5\6", 0, 0, few, few, *sizes, len(comment)) + comment


def _central_record(info: ZipInfo, name: str, offset: int) -> bytes:
    wide = [n for n in (info.file_size, info.compress_size, offset) if n >= _MAX_32]
    extra = _without_zip64(info.extra)
    version = info.extract_version
    if wide:
        extra = (
            _EXTRA.pack(_ZIP64_EXTRA, 8 * len(wide)) + struct.pack(f"<{len(wide)}Q", *wide) + extra
        )
        version = max(version, _VERSION_ZIP64)
    raw = _raw_name(info, name)
    record = _CENTRAL_RECORD.pack(
        b"PK\1\2",
        info.create_version,
        info.create_system,
        version,
        info.reserved,
        info.flag_bits,
        info.compress_type,
        *_dos_time(info),
        info.CRC,
        min(info.compress_size, _MAX_32),
        min(info.file_size, _MAX_32),
        len(raw),
        len(extra),
        len(info.comment),
        0,  # the number of the disk
        info.internal_attr,
        info.external_attr,
        min(offset, _MAX_32),
    )
    return record + raw + extra + info.comment


def _without_zip64(extra: bytes) -> bytes:
    return b"".join(
        _EXTRA.pack(kind, len(data)) + data for kind, data in _fields(extra) if kind != _ZIP64_EXTRA
    )


def _fields(extra: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield kind and content of each extra field; a rest that is none is passed over."""
    while len(extra) >= _EXTRA.size:
        kind, length = _EXTRA.unpack_from(extra)
        yield kind, extra[_EXTRA.size : _EXTRA.size + length]
        extra = extra[_EXTRA.size + length :]


def _raw_name(info: ZipInfo, name: str | None = None) -> bytes:
    encoding = "utf-8" if info.flag_bits & _UTF8 else "cp437"
    return (info.orig_filename if name is None else name).encode(encoding)


def _dos_time(info: ZipInfo) -> tuple[int, int]:
    year, month, day, hour, minute, second = info.date_time
    return hour << 11 | minute << 5 | second // 2, (year - 1980) << 9 | month << 5 | day

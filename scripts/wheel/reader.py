"""A wheel that is read where it lies: checked in its structure, its members inflated on demand."""

from __future__ import annotations

import csv
import io
import os
import re
import stat
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NamedTuple
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile, ZipFile, ZipInfo

from packaging.utils import canonicalize_name
from packaging.version import Version

from scripts.project import OVERLAY
from scripts.system.errors import AlreadyPatchedError, BrokenWheelError, UsageError
from scripts.wheel.names import WheelName, is_patched, metadata_header
from scripts.wheel.sbom import SBOM_PATH
from scripts.wheel.zip import (
    LOCAL_HEADER,
    LONGEST_DESCRIPTOR,
    STREAMED,
    Member,
    descriptor_size,
    local_agrees,
    local_size,
)

CHUNK = 1 << 20  # bytes held at a time while a wheel is copied or compared
LARGEST = 8 << 20
"""Bytes of what is held whole: a member that is read, or the directory of the zip file.

Ten times the largest of all pinned wheels, 0.33.0's RECORD of 720,362 bytes. The largest file that
a patch changes has 355,498 (0.28.0's gpu_model_runner.py), the largest directory 653,478 (0.33.0).
"""

_HEADER = 256  # bytes: most local headers are shorter, and one read takes half as long as two
# They sign a RECORD and hence cannot stand in it.
SIGNATURES = ("RECORD.jws", "RECORD.p7s")

_DIST_INFO = re.compile(r"(?P<folder>(?P<name>[^/]+)-(?P<version>[^/-]+)\.dist-info)/")
_ENCRYPTED = 0x1  # flag bit
_PART, _PATH = 255, 4096  # bytes of a file's name, and of a path: NAME_MAX and PATH_MAX of Linux
_DRIVE = re.compile(r"[A-Za-z]:")
# What zipfile and its decompressors raise on bytes that are no sound zip file.
_ZIP_FAULTS = (
    BadZipFile,
    EOFError,
    NotImplementedError,
    OverflowError,
    RuntimeError,
    ValueError,
    struct.error,
    zlib.error,
)


class RecordRow(NamedTuple):
    """What RECORD says of one file: `sha256=<base64>` and its size, both as text."""

    hash: str
    size: str


class WheelReader:
    """A wheel, opened and found sound in its structure. A context manager.

    Attributes:
        path: The file.
        name: What it is called.
        file_name: Its name, taken apart.
        distribution: The name in METADATA.
        version: The version in METADATA.
        dist_info: Name of its metadata folder.
        members: All members by path, folders (ending in `/`) included, in the order of the file.
        records: The rows of RECORD by path, in its order.
        comment: The comment of the zip file.
    """

    path: Path
    name: str
    file_name: WheelName
    distribution: str
    version: Version
    dist_info: str
    members: Mapping[str, Member]
    records: Mapping[str, RecordRow]
    comment: bytes

    def __init__(self, path: Path, name: str | None = None) -> None:
        """Open the wheel at `path` and check what can be checked without inflating it.

        Args:
            path: The file.
            name: What it will be called, where `path` is not its name yet.

        Raises:
            BrokenWheelError: It is no zip file, is cut off, or breaks the wheel format.
            UsageError: The file cannot be opened.
        """
        self.path = path
        self.name = name or path.name
        try:
            self._file: BinaryIO = _Bounded(io.FileIO(path))
        except OSError as error:
            raise UsageError(
                f"cannot read {path}: {error.strerror}",
                expected="a wheel",
                next_step="name a file that exists and that you may read",
            ) from error
        try:
            self.file_name = WheelName.parse(self.name)
            self._open()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> WheelReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @property
    def names(self) -> tuple[str, ...]:
        """Paths of all files inside, in the order in which they lie in the wheel."""
        return tuple(name for name in self.members if not name.endswith("/"))

    def read(self, name: str) -> bytes:
        """Return the content of one member.

        Raises:
            BrokenWheelError: There is no such member, or its content does not have its CRC, or is
                larger than `LARGEST`.
        """
        size = self.members[name].info.file_size if name in self.members else 0
        if size > LARGEST:
            raise self._broken(f"holds a {name} of {size} bytes", f"{LARGEST} at most")
        return b"".join(self.pieces(name))

    def pieces(self, name: str) -> Iterator[bytes]:
        """Yield the content of one member, at most 1 MiB at a time; the CRC is checked last.

        Raises:
            BrokenWheelError: There is no such member, or its content does not have its CRC.
        """
        if name not in self.members:
            raise self._broken(f"has no {name}", "that file")
        try:
            with self._zip.open(self.members[name].info) as file:
                while piece := file.read(CHUNK):
                    yield piece
        except _ZIP_FAULTS as error:
            raise self._broken(
                f"holds a {name} that cannot be read: {error}", "content with its CRC"
            ) from error

    def chunks(self, start: int, end: int) -> Iterator[memoryview]:
        """Yield the raw bytes of the file from `start` to `end`, at most 1 MiB at a time.

        Each piece is valid until the next one is asked for.
        """
        buffer = memoryview(bytearray(min(CHUNK, end - start)))
        while start < end:
            # By position: zipfile has its own opinion about where this file's cursor is.
            count = os.preadv(self._file.fileno(), [buffer[: end - start]], start)
            if not count:
                raise self._broken("became shorter while it was read", "a file that stays")
            yield buffer[:count]
            start += count

    def raw(self, start: int, end: int) -> bytes:
        """Return the raw bytes of the file from `start` to `end`, or to where it ends."""
        return os.pread(self._file.fileno(), end - start, start)

    def require_vllm(self) -> None:
        """Make sure that this is a build of vLLM, under whatever name.

        Raises:
            UsageError: It is none.
        """
        if not any(name.startswith("vllm/") for name in self.members):
            raise UsageError(
                f"{self.name} has no vllm/",
                expected="a build of vLLM",
                next_step="name another wheel",
            )

    def require_unpatched(self) -> None:
        """Make sure that this build of vLLM does not carry kvfix.

        Raises:
            AlreadyPatchedError: It does.
            UsageError: It is no build of vLLM.
        """
        self.require_vllm()
        ours = (OVERLAY.name, f"{OVERLAY.name}.py", f"{self.dist_info}/{SBOM_PATH}")
        overlay = next(
            (n for n in self.names if n in ours or n.startswith(f"{OVERLAY.name}/")), None
        )
        if is_patched(self.version) or overlay:
            raise AlreadyPatchedError(
                f"{self.name} is patched already: "
                + (f"it holds {overlay}" if overlay else f"its version is {self.version}"),
                expected="a stock build",
                next_step="give the wheel that this one was made from",
            )

    def _open(self) -> None:
        try:
            self._zip = ZipFile(self._file)
        except (*_ZIP_FAULTS, OSError) as error:
            raise self._broken(
                f"is no zip file, or is cut off: {error}", "a whole wheel"
            ) from error
        self.comment = self._zip.comment
        self.members = self._locate(self._zip.infolist())
        self.dist_info = self._find_dist_info()
        for name in ("METADATA", "WHEEL", "RECORD"):
            if f"{self.dist_info}/{name}" not in self.members:
                raise self._broken(f"has no {name} in {self.dist_info}", "METADATA, WHEEL, RECORD")
        self._read_identity()
        self.records = self._read_record()

    def _locate(self, infos: list[ZipInfo]) -> dict[str, Member]:
        """Find the bytes of every member. They must fill the file up to its directory.

        Bytes that belong to no member are what a streaming installer would see and nobody else.
        """
        members: dict[str, Member] = {}
        end = 0
        for info in sorted(infos, key=lambda info: info.header_offset):
            fault = _fault(info)
            if fault:
                raise self._broken(f"has a member {info.orig_filename!r}: {fault}", "plain members")
            name = info.filename
            if name in members:
                raise self._broken(f"has {name} twice", "each member once")
            if info.header_offset != end:
                raise self._broken(
                    f"has {name} at byte {info.header_offset} and a gap or overlap from {end}",
                    "members that follow one another",
                )
            members[name] = self._member(info)
            end = members[name].end
        for name in members:
            for folder in _folders(name):
                if folder in members:
                    raise self._broken(
                        f"has {name}, and {folder} as a file", "each name as one of the two"
                    )
        if end != self._zip.start_dir:
            raise self._broken(
                f"has {self._zip.start_dir - end} stray bytes", "nothing but members"
            )
        return members

    def _member(self, info: ZipInfo) -> Member:
        start, limit = info.header_offset, self._zip.start_dir
        header, size = self.raw(start, min(start + _HEADER, limit)), 0
        if len(header) >= LOCAL_HEADER.size:
            size = local_size(header)
            header = header[:size] if size <= _HEADER else self.raw(start, min(start + size, limit))
        data = start + size
        if not size or data + info.compress_size > limit or not local_agrees(header, info):
            raise self._broken(
                f"has no member {info.filename} where its directory says",
                "local headers that say what the directory says",
            )
        end = data + info.compress_size
        if info.flag_bits & STREAMED:
            descriptor = descriptor_size(info, self.raw(end, min(end + LONGEST_DESCRIPTOR, limit)))
            if not descriptor:
                raise self._broken(f"has no data descriptor behind {info.filename}", "one")
            end += descriptor
        return Member(info, start, data, end)

    def _find_dist_info(self) -> str:
        found = {match["folder"]: match for n in self.members if (match := _DIST_INFO.match(n))}
        if len(found) != 1:
            listed = ", ".join(sorted(found)) or "none"
            raise self._broken(f"has {len(found)} dist-info folders ({listed})", "exactly one")
        ((folder, match),) = found.items()
        self._require_identity(f"folder {folder}", match["name"], match["version"])
        return folder

    def _read_identity(self) -> None:
        metadata = self.read(f"{self.dist_info}/METADATA")
        self.distribution = metadata_header(metadata, "Name")
        stated = metadata_header(metadata, "Version")
        self.version = self._require_identity("METADATA", self.distribution, stated)

    def _require_identity(self, where: str, name: str, version: str) -> Version:
        try:
            read = Version(version)
        except ValueError:  # InvalidVersion, or more digits than an int takes
            read = None
        expected = (self.file_name.distribution, self.file_name.version)
        if read is None or (canonicalize_name(name), read) != expected:
            raise self._broken(
                f"says {name} {version} in its {where}", f"{expected[0]} {expected[1]}, as its name"
            )
        return read

    def _read_record(self) -> dict[str, RecordRow]:
        path = f"{self.dist_info}/RECORD"
        unhashed = {path, *(f"{self.dist_info}/{name}" for name in SIGNATURES)}
        rows: dict[str, RecordRow] = {}
        present, absent = set(self.names), set[str]()
        try:
            text = self.read(path).decode("utf-8")
            for row in csv.reader(io.StringIO(text, newline=""), strict=True):
                name, digest, size = row
                if name in rows:
                    raise self._broken(f"lists {name} twice in RECORD", "each file once")
                if not name.isprintable():
                    raise self._broken(f"lists {name!r} in RECORD", "names that can be shown")
                if name not in unhashed and not (digest and size):
                    raise self._broken(f"lists {name} in RECORD without hash or size", "both")
                if name not in present:
                    absent.add(name)
                    continue
                actual = str(self.members[name].info.file_size)
                if name not in unhashed and size != actual:
                    raise self._broken(f"lists {name} in RECORD with {size} bytes", actual)
                rows[name] = RecordRow(digest, size)
        except (ValueError, csv.Error) as error:
            raise self._broken(
                f"has a RECORD that cannot be read: {error}", "path,hash,size"
            ) from error
        missing = sorted(absent | (present - rows.keys() - (unhashed - {path})))
        if missing:
            raise self._broken(
                f"and its RECORD do not agree on {len(missing)} files, such as {missing[0]}",
                "a RECORD that lists every file, and no other",
            )
        return rows

    def _broken(self, what: str, expected: str) -> BrokenWheelError:
        return BrokenWheelError(
            f"{self.name} {what}",
            expected=expected,
            next_step="fetch or build the wheel again",
        )


class _Bounded(io.BufferedReader):
    """A file of which `zipfile`, which reads the directory in one go, gets no more than `LARGEST`.

    A directory of 500 MB, all of it records, would take ten times as much memory.
    """

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > LARGEST:
            raise BadZipFile(f"a directory of {size} bytes, where {LARGEST} at most are read")
        return super().read(size)


def _folders(name: str) -> Iterator[str]:
    """Yield the paths of the folders that `name` lies in, or is."""
    at = name.find("/")
    while at > 0:
        yield name[:at]
        at = name.find("/", at + 1)


def _fault(info: ZipInfo) -> str | None:
    name = info.orig_filename
    if name != info.filename:  # cut at a NUL, or named otherwise in an extra field
        return "two names in one"
    if name.startswith("/") or _DRIVE.match(name):
        return "an absolute path"
    if "\\" in name:
        return "a backslash"
    if not name.isprintable():
        return "a character that cannot be shown"
    parts = name.removesuffix("/").split("/")
    if len(name.encode()) > _PATH or any(len(part.encode()) > _PART for part in parts):
        return "a name that is longer than any file's"
    if ".." in parts:
        return "leads out of the folder"
    if "" in parts or "." in parts:
        return "an empty part"
    if info.flag_bits & _ENCRYPTED or info.compress_type not in (ZIP_STORED, ZIP_DEFLATED):
        return "neither stored nor deflated, or encrypted"
    kind = stat.S_IFMT(info.external_attr >> 16)  # 0 where it was zipped without permission bits
    if kind not in (0, stat.S_IFDIR if info.is_dir() else stat.S_IFREG):
        return "a link, a device, or a folder that is none"
    if info.is_dir() and info.file_size:
        return "a folder with content"
    return None

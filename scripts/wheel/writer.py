"""A wheel made from another one: what does not change is copied as it lies, compressed.

Of the 244 MB of a vLLM wheel a patch set changes less than one. To inflate and deflate the rest,
as unpacking and packing do, costs a minute and changes bytes that nobody asked to change.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol
from zipfile import ZipInfo

from scripts.system.errors import CheckFailedError
from scripts.system.files import replacing
from scripts.wheel.reader import SIGNATURES, WheelReader
from scripts.wheel.record import record_row, record_text, verify_record
from scripts.wheel.zip import Member, central_directory, renamed_local_header, stored_member

_REGULAR_FILE = 0o100644 << 16  # external attributes of a file that the source does not have


@dataclass(frozen=True)
class _Copied:
    """A member that is taken over, under the name `name`."""

    name: str
    member: Member


@dataclass(frozen=True)
class _Written:
    """A member whose content is `data`."""

    name: str
    data: bytes
    attributes: int


def write_wheel(
    source: WheelReader,
    target: Path,
    *,
    dist_info: str,
    replaced: Mapping[str, bytes],
    added: Mapping[str, bytes],
) -> None:
    """Write `source` with some files changed and added, check it, and name it `target`.

    The order is the source's, with new files before the metadata folder, and RECORD, which is
    made anew, at the very end. Same arguments, same bytes: dates are the source's, written
    members are stored rather than deflated, for what deflate gives depends on the zlib build.

    Args:
        source: The wheel to start from.
        target: The wheel to write, in a folder that exists.
        dist_info: The new name of the metadata folder.
        replaced: New content by the path that the file has in `source`. It keeps its permissions.
        added: Content of new files by the path that they will have.

    Raises:
        ValueError: A replaced file is not in `source`, an added one is, or one of them is RECORD.
        BrokenWheelError: `source` changed while it was read.
        CheckFailedError: What was written does not read back as it should; `target` is as it was.
        OSError: The folder cannot be written or is full; `target` is as it was.
    """
    plan = _plan(source, dist_info, replaced, added)
    with replacing(target) as file:
        _put(source, plan, file)
        file.flush()
        with ThreadPoolExecutor(1) as disk:  # which can write while the result is read back
            written = disk.submit(os.fsync, file.fileno())
            _check(
                Path(file.name),
                target.name,
                [part.name for part in plan if isinstance(part, _Written)],
            )
        written.result()


def first_difference(
    source: WheelReader,
    path: Path,
    *,
    dist_info: str,
    replaced: Mapping[str, bytes],
    added: Mapping[str, bytes],
) -> int | None:
    """Return the first byte of the file `path` that `write_wheel` would not write; None: none."""
    with path.open("rb") as file:
        same = _Same(file)
        try:
            _put(source, _plan(source, dist_info, replaced, added), same)
            same.end()
        except _DiffersError:
            return same.equal
    return None


class _Writes(Protocol):
    def write(self, data: bytes | memoryview, /) -> object: ...


class _DiffersError(Exception):
    """What was to be written is not what is there."""


class _Same:
    """Takes what would be written, and compares it with what a file has there.

    Attributes:
        equal: How many bytes are the same.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.equal = 0

    def write(self, data: bytes | memoryview) -> None:
        data, found = bytes(data), self._file.read(len(data))  # views compare slowly
        if found != data:
            pairs = zip(found, data, strict=False)
            self.equal += next((n for n, (a, b) in enumerate(pairs) if a != b), len(found))
            raise _DiffersError
        self.equal += len(data)

    def end(self) -> None:
        if self._file.read(1):
            raise _DiffersError


def _put(source: WheelReader, plan: Sequence[_Copied | _Written], file: _Writes) -> None:
    output = _Output(source, file)
    for part in plan:
        output.put(part)
    output.finish()


def _check(path: Path, name: str, written: list[str]) -> None:
    """Read back what was written, before it takes the place of anything."""
    with WheelReader(path, name) as result:
        faults = verify_record(result, written)
    if faults:
        raise CheckFailedError(
            f"{name} is not as it should be: " + "; ".join(faults),
            expected="a wheel whose RECORD is right to the last row",
            next_step="report this: it is a defect of kvfix, or of the disk",
        )


def renamed(source: WheelReader, name: str, dist_info: str) -> str:
    """Return the path of a member of `source` once its metadata folder is called `dist_info`."""
    folder = f"{source.dist_info}/"
    return f"{dist_info}/{name[len(folder) :]}" if name.startswith(folder) else name


def is_dropped(source: WheelReader, name: str) -> bool:
    """Whether a member of `source` has no place in a wheel made from it.

    Signatures vouch for the RECORD that was; an installer that checks them would, rightly,
    refuse the new one for a false signature rather than for a missing one.
    """
    return name in {f"{source.dist_info}/{signature}" for signature in SIGNATURES}


def _plan(
    source: WheelReader, dist_info: str, replaced: Mapping[str, bytes], added: Mapping[str, bytes]
) -> list[_Copied | _Written]:
    record, new_record = f"{source.dist_info}/RECORD", f"{dist_info}/RECORD"
    wrong = {*(replaced.keys() - set(source.names)), *({record} & replaced.keys())}
    final = {renamed(source, name, dist_info) for name in source.names}
    wrong |= added.keys() & final
    if wrong:
        raise ValueError(f"cannot replace or add {sorted(wrong)}")

    body: list[_Copied | _Written] = []
    metadata: list[_Copied | _Written] = []
    for name, member in source.members.items():
        if name == record or is_dropped(source, name):
            continue
        place = metadata if name.startswith(f"{source.dist_info}/") else body
        final_name = renamed(source, name, dist_info)
        if name in replaced:
            place.append(_Written(final_name, replaced[name], _attributes(member)))
        else:
            place.append(_Copied(final_name, member))
    for name, data in sorted(added.items()):
        place = metadata if name.startswith(f"{dist_info}/") else body
        place.append(_Written(name, data, _REGULAR_FILE))
    parts = [*body, *metadata]
    rows = {
        part.name: record_row(part.data)
        if isinstance(part, _Written)
        else source.records[part.member.name]
        for part in parts
        if not part.name.endswith("/")  # a folder has no row
    }
    parts.append(
        _Written(new_record, record_text(rows, new_record), _attributes(source.members[record]))
    )
    return parts


def _attributes(member: Member) -> int:
    # A wheel that was zipped on Windows has no permission bits to keep.
    attributes = member.info.external_attr
    return attributes if attributes >> 16 else _REGULAR_FILE


class _Output:
    """The wheel as far as it is written.

    Members that follow one another in the source are copied in one go, when the run ends.
    """

    def __init__(self, source: WheelReader, file: _Writes) -> None:
        self._source = source
        self._file = file
        self._like = source.members[f"{source.dist_info}/METADATA"].info
        self._entries: list[tuple[ZipInfo, str, int]] = []
        self._position = 0
        self._run = (0, 0)  # bytes of the source that belong here and are still to be copied

    def put(self, part: _Copied | _Written) -> None:
        """Append one member."""
        if isinstance(part, _Written):
            crc = zlib.crc32(part.data)
            info, header = stored_member(
                part.name, part.data, crc, like=self._like, attributes=part.attributes
            )
            self._entries.append((info, part.name, self._position))
            self._write(header + part.data)
            return
        member = part.member
        self._entries.append((member.info, part.name, self._position))
        if part.name == member.name:
            self._copy(member.start, member.end)
        else:
            header = self._source.raw(member.start, member.data)
            self._write(renamed_local_header(header, member.info, part.name))
            self._copy(member.data, member.end)

    def finish(self) -> None:
        """Append the central directory."""
        self._write(central_directory(self._entries, self._position, self._source.comment))

    def _copy(self, start: int, end: int) -> None:
        if self._run[1] != start:
            self._flush()
            self._run = (start, start)
        self._run = (self._run[0], end)
        self._position += end - start

    def _write(self, data: bytes) -> None:
        self._flush()
        self._file.write(data)
        self._position += len(data)

    def _flush(self) -> None:
        # A plain loop: on a local disk os.copy_file_range is no faster, for members lie on no
        # block boundary that a file system could share.
        for chunk in self._source.chunks(*self._run):
            self._file.write(chunk)
        self._run = (0, 0)

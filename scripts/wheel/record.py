"""RECORD: the list of a wheel's files with their hashes and sizes, written and checked."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
from collections.abc import Iterable, Mapping

from scripts.system.errors import BrokenWheelError
from scripts.wheel.reader import RecordRow, WheelReader

# The format forbids md5 and sha1, and the rest of hashlib is not what installers have in common.
_ALGORITHMS = ("sha256", "sha384", "sha512")


def record_row(data: bytes) -> RecordRow:
    """Return what RECORD says of a file with the content `data`."""
    return RecordRow(f"sha256={_encoded(hashlib.sha256(data).digest())}", str(len(data)))


def record_text(rows: Mapping[str, RecordRow], own_name: str) -> bytes:
    """Return a RECORD of `rows`, by path and in their order, and of itself at `own_name`."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows((name, *row) for name, row in rows.items())
    writer.writerow((own_name, "", ""))
    return text.getvalue().encode("utf-8")


def verify_record(wheel: WheelReader, hashed: Iterable[str]) -> list[str]:
    """Return the faults of RECORD: every size is compared, and the hashes of the files `hashed`.

    That each file is listed once and none is missing, the reader has made sure of.
    """
    own = f"{wheel.dist_info}/RECORD"
    faults = [
        f"{name}: RECORD says {row.size} bytes, it has {wheel.members[name].info.file_size}"
        for name, row in wheel.records.items()
        if row.size not in ("", str(wheel.members[name].info.file_size))
    ]
    if wheel.names[-1] != own:
        faults.append(f"{own}: is not the last file")
    for name in hashed:
        row = wheel.records.get(name)
        if row is None:
            faults.append(f"{name}: RECORD does not list it")
        elif name != own:
            faults += _hash_faults(wheel, name, row.hash)
    return faults


def _hash_faults(wheel: WheelReader, name: str, stated: str) -> list[str]:
    algorithm, _, encoded = stated.partition("=")
    if algorithm not in _ALGORITHMS:
        return [f"{name}: RECORD has a hash of the kind {algorithm!r}"]
    digest = hashlib.new(algorithm)
    try:
        for piece in wheel.pieces(name):
            digest.update(piece)
    except BrokenWheelError as error:
        return [error.found]
    if _encoded(digest.digest()) != encoded:
        return [f"{name}: its content does not have the hash that RECORD states"]
    return []


def _encoded(digest: bytes) -> str:
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()

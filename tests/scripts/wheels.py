"""Small real wheels with everything in them that a build may put there."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import random
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from scripts.wheel.names import (
    VERSION_MODULE,
    dist_info_folder,
    patched_metadata,
    patched_version,
    patched_version_module,
)
from scripts.wheel.reader import WheelReader
from scripts.wheel.writer import write_wheel

TAGS = "cp38-abi3-manylinux_2_35_x86_64"
NATIVE = "vllm/_C.abi3.so"
SCRIPT = "vllm/tool.sh"
ODD_NAME = 'vllm/data/größe, "quoted".json'
WORKER = "vllm/worker.py"
NOT_COPIED = ("/RECORD", "/RECORD.jws", "/RECORD.p7s")  # it is made anew, for what has no signature

VERSION_TEXT = """\
# generated
__version__ = version = '{version}'
__version_tuple__ = version_tuple = {numbers}

__commit_id__ = commit_id = 'gbc150f502'
"""


def stock_files(version: str = "0.20.2") -> dict[str, bytes]:
    """Return the files of a wheel, without its metadata folder."""
    public, _, local = version.partition("+")
    numbers = (*map(int, public.split(".")), *filter(None, [local]))
    noise = random.Random(0).randbytes(100_000)  # noqa: S311
    return {
        NATIVE: b"\x7fELF" + noise + bytes(100_000),
        "vllm/__init__.py": b"from ._version import __version__\n",
        VERSION_MODULE: VERSION_TEXT.format(version=version, numbers=numbers).encode(),
        "vllm/data/": b"",
        ODD_NAME: b'{"a": 1}\r\n' * 50,
        WORKER: b"def work():\n    return 1\n" * 100,
        SCRIPT: b"#!/bin/sh\nexit 0\n",
        "vllm/empty.py": b"",
    }


class _Pipe(io.BytesIO):
    """What a build that streams its wheel writes into: no seeking back to fill in sizes."""

    def seekable(self) -> bool:
        return False

    def seek(self, *_: int) -> int:
        raise io.UnsupportedOperation


def zip_bytes(
    files: Mapping[str, bytes] | list[tuple[str, bytes]],
    *,
    streamed: bool = False,
    zip64: bool = False,
    stored: bool = False,
    comment: bytes = b"",
) -> bytes:
    """Return a zip file with these members, in this order."""
    buffer = _Pipe() if streamed else io.BytesIO()
    pairs = files if isinstance(files, list) else list(files.items())
    with zipfile.ZipFile(buffer, "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a member twice is what some tests are about
        for name, data in pairs:
            info = zipfile.ZipInfo(name, (2026, 5, 8, 20, 9, 9))
            executable = name.endswith((".so", ".sh"))
            info.external_attr = (0o100755 if executable else 0o100640) << 16
            if name.endswith("/"):
                info.external_attr = 0o40755 << 16 | 0x10
            info.compress_type = zipfile.ZIP_STORED if stored else zipfile.ZIP_DEFLATED
            info.create_system = 3
            if name == SCRIPT:
                info.comment = b"a comment"
                info.extra = b"\xfe\xca\x02\x00hi"  # a field of a kind that nobody knows
            with archive.open(info, "w", force_zip64=zip64) as member:
                member.write(data)
        archive.comment = comment
    return buffer.getvalue()


def with_metadata(
    files: Mapping[str, bytes], version: str = "0.20.2", name: str = "vllm"
) -> dict[str, bytes]:
    """Return `files` and a metadata folder for them."""
    folder = f"{name.replace('-', '_')}-{version}.dist-info"
    whole = {
        **files,
        f"{folder}/licenses/LICENSE": b"free\n",
        f"{folder}/METADATA": (
            f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n"
            f"Requires-Dist: torch==2.11.0\n\nVersion: not this one\nName: nor this\n"
        ).encode(),
        f"{folder}/WHEEL": b"Wheel-Version: 1.0\nTag: cp38-abi3-linux_x86_64\n",
        f"{folder}/entry_points.txt": b"[console_scripts]\nvllm = vllm:main\n",
    }
    whole[f"{folder}/RECORD"] = record(whole, f"{folder}/RECORD")
    return whole


def record(files: Mapping[str, bytes], own: str) -> bytes:
    """Return a RECORD of `files`, made without the code under test."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for name, data in files.items():
        if name != own and not name.endswith("/"):
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
            writer.writerow((name, f"sha256={digest}", len(data)))
    writer.writerow((own, "", ""))
    return text.getvalue().encode()


def stock_wheel_file(
    folder: Path,
    files: Mapping[str, bytes] | None = None,
    *,
    version: str = "0.20.2",
    name: str = "vllm",
    tags: str = TAGS,
    streamed: bool = False,
    zip64: bool = False,
) -> Path:
    """Write a stock wheel into `folder` and return its path."""
    path = folder / f"{name.replace('-', '_')}-{version}-{tags}.whl"
    whole = with_metadata(stock_files(version) if files is None else files, version, name)
    path.write_bytes(zip_bytes(whole, streamed=streamed, zip64=zip64, comment=b"of the file"))
    return path


class Changes:
    """What a patch set would make of a stock wheel: the arguments for `write_wheel`."""

    def __init__(self, stock: WheelReader) -> None:
        version = patched_version(stock.version, "0.1.0")
        metadata = f"{stock.dist_info}/METADATA"
        self.dist_info = dist_info_folder(stock.distribution, version)
        self.file_name = str(stock.file_name.with_version(version))
        self.replaced = {metadata: patched_metadata(stock.read(metadata), version)}
        if VERSION_MODULE in stock.members:
            module = stock.read(VERSION_MODULE)
            self.replaced[VERSION_MODULE] = patched_version_module(module, stock.version, version)
        if WORKER in stock.members:
            self.replaced[WORKER] = b"def work():\n    return 2\n"
        if SCRIPT in stock.members:
            self.replaced[SCRIPT] = b"#!/bin/sh\nexit 1\n"
        self.added = {
            "vllm_overlay/__init__.py": b'"""Overlay."""\n',
            "vllm_overlay/worker.py": b"FIXED = True\n",
            f"{self.dist_info}/sboms/kvfix.cdx.json": b"{}\n",
        }

    def expected(self, stock: WheelReader) -> dict[str, bytes]:
        """Return the content of every file of the result but RECORD."""
        content = {}
        for name in stock.members:
            if name.endswith(NOT_COPIED):
                continue
            final = name.replace(f"{stock.dist_info}/", f"{self.dist_info}/")
            content[final] = self.replaced.get(name, stock.read(name))
        return {**content, **self.added}


@contextmanager
def opened(path: Path) -> Iterator[tuple[WheelReader, Changes]]:
    """Open a stock wheel and say what to change in it."""
    with WheelReader(path) as stock:
        yield stock, Changes(stock)


def write(stock: WheelReader, changes: Changes, folder: Path) -> Path:
    """Write the patched wheel into `folder` and return its path."""
    target = folder / changes.file_name
    write_wheel(
        stock,
        target,
        dist_info=changes.dist_info,
        replaced=changes.replaced,
        added=changes.added,
    )
    return target

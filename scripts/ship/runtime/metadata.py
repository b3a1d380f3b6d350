"""What states a version or lists files: edited in what is installed, never shipped whole.

Builds of one release differ there: another local version, other requirements, another RECORD.
"""

from __future__ import annotations

import ast
import base64
import csv
import hashlib
import io
import json
import re
import uuid
from collections.abc import Iterable, Mapping
from pprint import pformat
from typing import Any
from urllib.parse import quote

from .refusal import BROKEN, RefusalError

VERSION_MODULE = "vllm/_version.py"
SBOM_PATH = "sboms/kvfix.cdx.json"
_BUILD, _FILES = (f"vllm_overlay/provenance/{name}.py" for name in ("build", "files"))
_VERSION_LINE = re.compile(r"^(__version__ = version = )(['\"])(?P<value>[^'\"\n]*)\2$", re.M)
_TUPLE_LINE = re.compile(r"^(__version_tuple__ = version_tuple = )(?P<value>\(.*\))$", re.M)

Row = list[str]
"""A row of RECORD: path, hash, size; the latter two may be empty."""


def patched_version(stock: str, local: str) -> str:
    """Return 0.20.2+kvfix.0.1.0 for 0.20.2, and 0.20.2+cu129.kvfix.0.1.0 for 0.20.2+cu129."""
    return f"{stock}{'.' if '+' in stock else '+'}{local}"


def header(metadata: bytes, name: str) -> str:
    """Return the value of a header of METADATA that must stand there once."""
    start, end = _span(metadata, name)
    return metadata[start:end].decode("utf-8", "replace").strip()


def patched_metadata(metadata: bytes, version: str) -> bytes:
    """Return METADATA with another version and every other byte as it was."""
    start, end = _span(metadata, "Version")
    return metadata[:start] + version.encode() + metadata[end:]


def _span(metadata: bytes, name: str) -> tuple[int, int]:
    blank = re.search(rb"^\r?$", metadata, re.M)  # the description may show headers of its own
    headers = metadata[: blank.start()] if blank else metadata
    pattern = rb"^" + name.encode() + rb":[ \t]*(?P<value>[^\r\n]*)"
    found = [*re.finditer(pattern, headers, re.M | re.I)]
    if len(found) != 1:
        raise _broken("METADATA", f"{len(found)} headers {name!r}")
    return found[0].span("value")


def patched_version_module(module: bytes, stock: str, version: str) -> bytes:
    """Return `vllm/_version.py` with another version.

    It may leave out the local part of `stock`, which only METADATA has in some builds.
    """
    text = module.decode("utf-8")
    lines = [[*pattern.finditer(text)] for pattern in (_VERSION_LINE, _TUPLE_LINE)]
    if [len(found) for found in lines] != [1, 1]:
        raise _broken(VERSION_MODULE, "not one version and one tuple of it")
    stated = lines[0][0]["value"]
    if stated not in (stock, stock.partition("+")[0]):
        raise _broken(VERSION_MODULE, f"version {stated} where METADATA has {stock}")
    numbers = ast.literal_eval(lines[1][0]["value"])
    if "+" in stated:
        numbers = numbers[:-1]
    tuple_ = repr((*numbers, version.partition("+")[2]))
    text = _VERSION_LINE.sub(lambda line: f"{line[1]}{line[2]}{version}{line[2]}", text)
    return _TUPLE_LINE.sub(lambda line: line[1] + tuple_, text).encode()


def provenance(
    build: Mapping[str, str], files: Mapping[str, bytes], source: Mapping[str, str]
) -> dict[str, bytes]:
    """Return the modules that tell what this vLLM was made from and what was changed, by path.

    Args:
        build: What the installer says of itself.
        files: All that is changed or added, but for these modules.
        source: What there was before.
    """
    made_from = _module("What this vLLM was made from.", "BUILD", {**build, **source})
    listed = {**files, _BUILD: made_from}
    digests = {path: hashlib.sha256(listed[path]).hexdigest() for path in sorted(listed)}
    title = "What this build changed or added, by sha256."
    return {_BUILD: made_from, _FILES: _module(title, "FILES", digests)}


def _module(title: str, name: str, value: Mapping[str, str]) -> bytes:
    body = pformat(dict(value), width=96, sort_dicts=False)
    return f'"""{title}"""\n\n# SPDX-License-Identifier: Apache-2.0\n\n{name} = {body}\n'.encode()


def patched_sbom(template: Mapping[str, Any], name: str, stock: str, version: str) -> bytes:
    """Return the SBOM of this environment: `name` in `version`, made from `stock`."""
    document = json.loads(json.dumps(template))
    component = document["metadata"]["component"]
    before = component["bom-ref"]
    (ancestor,) = component["pedigree"]["ancestors"]
    for part, stated in ((component, version), (ancestor, stock)):
        distribution = re.sub(r"[-_.]+", "-", name).lower()
        purl = f"pkg:pypi/{distribution}@{quote(stated, safe='')}"
        part.update({"name": name, "version": stated, "purl": purl, "bom-ref": purl})
    for dependency in document["dependencies"]:
        dependency["ref"] = (
            component["bom-ref"] if dependency["ref"] == before else dependency["ref"]
        )
    document.pop("serialNumber", None)
    document["serialNumber"] = uuid.uuid5(uuid.NAMESPACE_OID, _text(document)).urn
    return _text(document).encode()


def _text(document: object) -> str:
    return json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def record_row(path: str, data: bytes) -> Row:
    """Return what RECORD says of a file."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return [path, f"sha256={digest}", str(len(data))]


def record_rows(record: bytes) -> list[Row]:
    """Return the rows of RECORD."""
    try:
        rows = [*csv.reader(io.StringIO(record.decode("utf-8"), newline=""), strict=True)]
    except (ValueError, csv.Error) as error:
        raise _broken("RECORD", f"rows that cannot be read: {error}") from error
    if any(len(row) != 3 for row in rows):
        raise _broken("RECORD", "a row that is not path, hash and size")
    return rows


def patched_record(record: bytes, gone: Iterable[str], rows: Iterable[Row]) -> bytes:
    """Return RECORD without the paths `gone` and with `rows` in the place of those of their paths.

    Line ends stay as they are, pip's CR LF or uv's LF. What is new goes where it belongs if the
    rows are sorted, as pip and uv have them, else to the end.
    """
    stock = record_rows(record)
    new = {row[0]: row for row in rows}
    dropped = {*gone}
    kept = [new.pop(row[0], row) for row in stock if row[0] not in dropped]
    result = [*kept, *new.values()]
    if stock == sorted(stock):
        result.sort()
    text = io.StringIO()
    csv.writer(text, lineterminator="\r\n" if b"\r\n" in record else "\n").writerows(result)
    return text.getvalue().encode()


def _broken(file: str, what: str) -> RefusalError:
    return RefusalError(
        BROKEN,
        f"{file} of the installed vLLM has {what}",
        "what pip or uv install from a wheel",
        "install vLLM again",
    )

"""What an installer brings along: a plan in JSON, the new files, and the template of the SBOM."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import ZipFile

PLAN, SBOM, FILES = "plan.json", "sbom.json", "files/"


@dataclass(frozen=True)
class Bundle:
    """The content of an installer.

    Attributes:
        release: The release that it is for.
        local: What it appends to the version's local part: `kvfix.0.1.0`.
        stock: sha256 by path of the release's own files that change, as the release has them.
        files: New content by path: of those, and of the files that are new.
        build: What `python -m vllm_overlay` says of the build, without its source.
        fixes: Their ids.
        sbom: The SBOM as a template: `metadata.patched_sbom` enters versions.
    """

    release: str
    local: str
    stock: dict[str, str]
    files: dict[str, bytes]
    build: dict[str, str]
    fixes: list[str]
    sbom: dict[str, Any]

    @property
    def added(self) -> list[str]:
        """Paths of the files that the release does not have."""
        return [path for path in self.files if path not in self.stock]

    def members(self) -> dict[str, bytes]:
        """Return what the archive holds of it, by name."""
        names = ("release", "local", "stock", "build", "fixes")
        plan = {name: getattr(self, name) for name in names}
        texts = {PLAN: plan, SBOM: self.sbom}
        members = {name: json.dumps(value, indent=1).encode() for name, value in texts.items()}
        return {**members, **{FILES + path: data for path, data in self.files.items()}}


def read_bundle(archive: Path) -> Bundle:
    """Return what `members` put into the archive; zipfile checks each member's CRC.

    Raises:
        OSError, zipfile.BadZipFile, KeyError: It is no such archive.
    """
    with ZipFile(archive) as content:
        plan = json.loads(content.read(PLAN))
        names = (name for name in content.namelist() if name.startswith(FILES))
        files = {name[len(FILES) :]: content.read(name) for name in names}
        return Bundle(files=files, sbom=json.loads(content.read(SBOM)), **plan)


def sha256(data: bytes) -> str:
    """Return the sha256 as 64 hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()

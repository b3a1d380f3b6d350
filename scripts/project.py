"""Where things are, and what `pyproject.toml` says about this patch set."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from scripts.system.errors import UnknownReleaseError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PATCHES = ROOT / "patches"
OVERLAY = ROOT / "vllm_overlay"
REPORTS = ROOT / "reports"
RECORDS = ROOT / "records"
DIST = ROOT / "dist"


@dataclass(frozen=True)
class Project:
    """The patch set as `pyproject.toml` declares it."""

    version: str
    releases: tuple[str, ...]
    default_release: str


def read_toml(path: Path) -> dict[str, Any]:
    """Read one TOML file.

    Raises:
        ValueError: It is none; the message says where.
    """
    return parse_toml(path.read_bytes())


def parse_toml(data: bytes) -> dict[str, Any]:
    """Return what the bytes of a TOML file say.

    Raises:
        ValueError: They are none; the message says where.
    """
    try:
        return tomllib.loads(data.decode())
    except RecursionError as error:
        raise ValueError("its brackets are nested too deep") from error


@cache
def project() -> Project:
    """Return the declaration of this patch set."""
    document = read_toml(ROOT / "pyproject.toml")
    table = document["tool"]["kvfix"]
    return Project(
        version=document["project"]["version"],
        releases=tuple(table["releases"]),
        default_release=table["default-release"],
    )


def supported_release(text: str) -> str:
    """Return the supported release that `text` names in full, in any spelling of PEP 440.

    To PEP 440, 0.20 and 0.20.0 are the same. To people 0.20 is a line of releases, of which they
    may mean the newest.

    Raises:
        UnknownReleaseError: `text` is no version, or none that kvfix supports, or a part of one.
    """
    releases = project().releases
    try:
        version, final = str(Version(text)), _is_final(Version(text))
    except InvalidVersion:
        version, final = "", False
    if version in releases:
        return version
    meant = meant_releases(version, releases) if version else []
    raise UnknownReleaseError(
        f"{text!r} names {len(meant)} vLLM releases"
        if meant
        else f"{text!r} is not a supported vLLM release",
        expected=f"one of {', '.join(meant or releases)}",
        next_step="give one of these"
        if meant or not final
        else "give one of these, or carry the fixes to it: "
        f"nox -s lock -- {version}, then: nox -s rebase -- {version}",
    )


def meant_releases(version: str, releases: Iterable[str]) -> list[str]:
    """Return those of `releases` that `version`, in its normal form, may be a part of."""
    return [
        release
        for release in releases
        if release.startswith(f"{version}.") or Version(release) == Version(version)
    ]


def _is_final(version: Version) -> bool:
    return not version.is_prerelease and version.local is None

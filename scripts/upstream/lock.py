"""`patches/upstream.lock`: the files of every supported release, by name and sha256.

The format is TOML: per release a table `files` of names and their sha256. A release may be pinned
long before the fixes are carried to it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from shlex import quote
from typing import Any

from packaging.utils import parse_sdist_filename, parse_wheel_filename
from packaging.version import Version

from scripts.project import PATCHES, meant_releases, parse_toml
from scripts.system.errors import NotLockedError, RegistryError, UnknownReleaseError

DISTRIBUTION = "vllm"
LOCK = PATCHES / "upstream.lock"

_LINUX = r"(many|musl)?linux(\d+|_\d+_\d+)?_"  # a platform tag up to the machine

_HEADER = (
    "# What kvfix builds on: every file of each release, with its sha256.\n"
    "# Written by `nox -s lock -- RELEASE`.\n\n"
)


@dataclass(frozen=True)
class LockedFile:
    """One pinned file; `sha256` is 64 lower-case hexadecimal digits."""

    name: str
    sha256: str


@dataclass(frozen=True)
class LockedRelease:
    """One release as it is pinned: its sdist and its wheels."""

    release: str
    sdist: LockedFile
    wheels: tuple[LockedFile, ...]

    def wheel_for(self, arch: str) -> LockedFile:
        """Return the wheel for a machine (`x86_64`, `aarch64`), the one that installers choose.

        Where a release has several, that is the one with the highest build tag.

        Raises:
            NotLockedError: There is none, or two that differ in more than the build tag.
        """
        builds: dict[Any, list[LockedFile]] = {}
        for wheel in self.wheels:
            _, _, build, tags = parse_wheel_filename(wheel.name)
            if any(re.fullmatch(_LINUX + re.escape(arch), tag.platform) for tag in tags):
                builds.setdefault(build, []).append(wheel)
        best = builds[max(builds)] if builds else []
        if len(best) == 1:
            return best[0]
        raise NotLockedError(
            f"{'no wheel' if not best else 'more than one wheel'} of {self.release} for {arch!r} "
            f"is pinned; there are: {', '.join(wheel.name for wheel in self.wheels) or 'none'}",
            expected="one wheel for that machine",
            next_step="apply takes another machine's with --arch, or a file of yours with --wheel; "
            f"if there are new ones on the index: nox -s lock -- {self.release}",
        )

    def hashes(self) -> dict[str, str]:
        """Return the sha256 of every file by its name, the sdist first."""
        return {file.name: file.sha256 for file in (self.sdist, *self.wheels)}


def load_lock(path: Path = LOCK) -> dict[str, LockedRelease]:
    """Read the lock file: release → what is pinned of it, oldest release first.

    Raises:
        RegistryError: The file contradicts itself; the message names the place.
    """
    return dict(_parsed(path, path.read_bytes())) if path.exists() else {}


@lru_cache(maxsize=4)  # a session asks for it 2,000 times, and takes 10 ms to read it anew
def _parsed(path: Path, data: bytes) -> dict[str, LockedRelease]:
    try:
        document = parse_toml(data)
    except ValueError as error:  # a TOMLDecodeError is one; it names line and column
        raise _wrong(path, f"it is no TOML: {error}") from error
    releases: dict[Version, LockedRelease] = {}
    for name, table in document.items():
        version = final_version(name)
        if version is None or str(version) != name:
            raise _wrong(path, f"{name!r} is no final release in its normal form")
        if version in releases:
            raise _wrong(path, f"{name} and {releases[version].release} are the same release")
        if not isinstance(table, dict) or not isinstance(table.get("files"), dict):
            raise _wrong(path, f"{name} has no table of files")
        if surplus := table.keys() - {"files"}:
            raise _wrong(path, f"{name} has keys of no meaning: {', '.join(sorted(surplus))}")
        releases[version] = read_release(path, name, table["files"])
    return {str(version): releases[version] for version in sorted(releases)}


def locked_release(release: str, path: Path = LOCK) -> LockedRelease:
    """Return what is pinned of one release; 0.25 is 0.25.0.

    Raises:
        NotLockedError: Nothing is.
        RegistryError: The lock file contradicts itself.
    """
    releases = load_lock(path)
    version = final_version(release)
    for name, locked in releases.items():
        if name == release or Version(name) == version:
            return locked
    raise NotLockedError(
        f"vLLM {release} is not in patches/upstream.lock",
        expected=f"one of {', '.join(releases) or '(the file is empty)'}",
        next_step=f"nox -s lock -- {release}",
    )


def render(releases: Mapping[str, LockedRelease]) -> str:
    """Return the text of the lock file: the same releases give the same bytes."""
    import tomli_w

    tables = {name: {"files": releases[name].hashes()} for name in sorted(releases, key=Version)}
    return _HEADER + tomli_w.dumps(tables)


def read_release(path: Path, name: str, files: dict[str, Any]) -> LockedRelease:
    """Check the files of one entry and sort them; `path` is only named in messages."""
    sdists: list[LockedFile] = []
    wheels: list[LockedFile] = []
    for file in sorted(files):
        try:
            parse = parse_sdist_filename if is_sdist(file) else parse_wheel_filename
            distribution, version = parse(file)[:2]
        except ValueError as error:  # InvalidSdistFilename and InvalidWheelFilename are such
            raise _wrong(path, f"{name} has a file that is no wheel or .tar.gz: {error}") from None
        if distribution != DISTRIBUTION or version != Version(name):
            raise _wrong(path, f"{name} has a file of another release: {file}")
        if not isinstance(files[file], str) or not re.fullmatch(r"[0-9a-f]{64}", files[file]):
            raise _wrong(path, f"the sha256 of {file} is {files[file]!r}")
        (sdists if is_sdist(file) else wheels).append(LockedFile(file, files[file]))
    if len(sdists) != 1:
        raise _wrong(path, f"{name} has {len(sdists)} source archives instead of one")
    return LockedRelease(name, sdists[0], tuple(wheels))


def is_sdist(file: str) -> bool:
    """Whether the name `file` is that of a source archive."""
    return file.endswith(".tar.gz")


def pinned_release(text: str) -> str:
    """Return the pinned release that a command line names, in its normal form.

    Raises:
        UnknownReleaseError: None is called so in full.
    """
    version, pinned = final_version(text), load_lock()
    if version is not None and str(version) in pinned:
        return str(version)
    meant = meant_releases(str(version), pinned) if version else []
    raise UnknownReleaseError(
        f"{text!r} names {len(meant)} pinned vLLM releases"
        if meant
        else f"{text!r} is not a pinned vLLM release",
        expected=f"one of {', '.join(meant or pinned)}",
        next_step="give one of these"
        if meant or not version
        else f"give one of these, or pin it first: nox -s lock -- {version}",
    )


def final_version(text: str) -> Version | None:
    """Return the final release that `text` names; None where it names none."""
    try:
        version = Version(text)
    except ValueError:  # InvalidVersion, or more digits than an int takes
        return None
    # A post-release is a final one; what the public may not install is not.
    return None if version.is_prerelease or version.local else version


def _wrong(path: Path, what: str) -> RegistryError:
    return RegistryError(
        f"{path}: {what}",
        expected="per release one table `files` of names and sha256, with one sdist",
        next_step=f"take back what changed it: git restore {quote(str(path))}",
    )

"""The vLLM that is installed: where it lies, what it says of itself, and what state it is in."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from .bundle import Bundle, sha256
from .files import folders_of
from .metadata import VERSION_MODULE, header, patched_version, record_row, record_rows
from .refusal import ALREADY_PATCHED, BROKEN, DIFFERS, STORAGE, USAGE, WRONG_RELEASE, RefusalError

UNDO = "kvfix-undo.zip"
"""In the metadata folder: what was there before."""
WORK = ".kvfix"
"""Beside `vllm`, while files are exchanged."""
OVERLAY = "vllm_overlay"
"""The package that only a patched vLLM has; pip leaves byte code of it that it did not install."""


@dataclass(frozen=True)
class Installed:
    """One vLLM in the folder `site`; `dist_info` is the name of its metadata folder."""

    site: Path
    dist_info: str
    name: str
    version: str

    @property
    def public(self) -> str:
        """The version without its local part."""
        return self.version.partition("+")[0]

    @property
    def is_patched(self) -> bool:
        """Whether it carries kvfix, by this installer, as a wheel or as a layer."""
        parts = self.version.partition("+")[2].split(".")
        return "kvfix" in parts or (self.site / OVERLAY / "__init__.py").is_file()

    @property
    def undo(self) -> Path:
        """What this installer kept of the stock files; not there in a wheel or a layer."""
        return self.site / self.dist_info / UNDO

    def dist_info_with(self, local: str) -> str:
        """Return the name of its metadata folder once `local` is appended to its version."""
        version = patched_version(self.version, local)
        return self.dist_info.replace(f"-{self.version}.", f"-{version}.")

    def read(self, path: str) -> bytes:
        """Return the content of a file of its metadata folder."""
        return (self.site / self.dist_info / path).read_bytes()


def find_site(target: str | None) -> Path:
    """Return the folder that `vllm` lies in: `target`, or that of the Python that runs this.

    Raises:
        RefusalError: There is no vLLM.
    """
    if target is not None:
        site, where = Path(target).resolve(), f"no vllm/__init__.py in {target}"
        found = (site / "vllm" / "__init__.py").is_file() or (site / WORK).is_dir()
    else:
        spec = importlib.util.find_spec("vllm")  # reads nothing of it
        found, where = spec is not None and spec.origin is not None, "no vLLM for this Python"
        site = Path(spec.origin).parent.parent if spec and spec.origin else Path()
    if not found:
        raise RefusalError(
            USAGE,
            where,
            "the folder that vllm/ is installed in",
            "run this with the Python that runs vLLM, or name the folder: --target DIR",
        )
    return site


def find_installed(site: Path) -> Installed:
    """Return what is installed in `site`, by the metadata folder whose RECORD lists vLLM.

    Raises:
        RefusalError: There is none, or several, or it is editable.
    """
    found = [path.parent for path in sorted(site.glob("*.dist-info/RECORD")) if _has_vllm(path)]
    editable = [path for path in found if _is_editable(path)]
    if not found or editable:
        raise RefusalError(
            BROKEN,
            f"vLLM in {site} is an editable install or a checkout: "
            + (f"{editable[0].name} says so" if editable else "no metadata folder lists its files"),
            "what pip or uv install from a wheel",
            "patch the sources instead, where kvfix is: nox -s apply -- RELEASE --tree DIR",
        )
    if len(found) > 1:
        raise RefusalError(
            BROKEN,
            f"{site} has several vLLM: {', '.join(path.name for path in found)}",
            "one",
            "uninstall them, and install the one that you want",
        )
    metadata = (found[0] / "METADATA").read_bytes()
    return Installed(site, found[0].name, header(metadata, "Name"), header(metadata, "Version"))


def _has_vllm(record: Path) -> bool:
    data = record.read_bytes()  # of hundreds of packages: look before reading row by row
    return VERSION_MODULE.encode() in data and any(
        row[0] == VERSION_MODULE for row in record_rows(data)
    )


def _is_editable(dist_info: Path) -> bool:
    try:
        origin = json.loads((dist_info / "direct_url.json").read_bytes())
        return bool(origin.get("dir_info", {}).get("editable"))
    except (OSError, ValueError, AttributeError):
        return False


def require_stock(installed: Installed, bundle: Bundle) -> None:
    """Make sure that the fixes can go into what is installed; nothing is written.

    Raises:
        RefusalError: It is patched, another release, or other sources.
    """
    if installed.is_patched:
        advice = (
            f"install the stock release again and remove {installed.site / OVERLAY} if that is "
            "still there, or start from the stock image"
        )
        if installed.undo.is_file():
            advice = "take what is there out first: run this with --undo"
        raise RefusalError(
            ALREADY_PATCHED,
            f"{installed.name} {installed.version} in {installed.site} is patched already",
            f"stock {bundle.release}",
            advice,
        )
    final = re.fullmatch(r"[0-9.]+", installed.public)
    if final and installed.public != bundle.release:
        raise RefusalError(
            WRONG_RELEASE,
            f"{installed.name} in {installed.site} is release {installed.version}",
            f"a build of {bundle.release}",
            f"make the one for it, where kvfix is: nox -s apply -- {installed.public} --layer",
        )
    faults = [*_differences(installed, bundle)]
    if faults:
        listed = "".join(f"\n  {fault}" for fault in faults)
        raise RefusalError(
            DIFFERS,
            f"{installed.site} has {len(faults)} files that are not the release's own:{listed}",
            f"each file that a fix changes byte for byte as {bundle.release} has it",
            "install the stock release again, or carry the fixes to the sources that this was "
            f"built from: nox -s apply -- {bundle.release} --tree DIR",
        )


def _differences(installed: Installed, bundle: Bundle) -> list[str]:
    site = installed.site
    listed = {row[0]: row for row in record_rows(installed.read("RECORD"))}
    faults = []
    for path, expected in bundle.stock.items():
        found = digest_of(site, path)
        if found != expected:
            faults.append(f"{path}: {found}, expected {expected}")
    # These differ from build to build; that nobody changed them its own RECORD says.
    for path in (VERSION_MODULE, f"{installed.dist_info}/METADATA"):
        found = digest_of(site, path)
        if len(found) != 64:
            faults.append(f"{path}: {found}")
        elif record_row(path, (site / path).read_bytes()) != listed.get(path):
            faults.append(f"{path}: {found}, its RECORD has another")
    added = [PurePosixPath(path) for path in bundle.added]
    for above in sorted({each for path in added for each in path.parents}):
        if os.path.lexists(site / above) and not (site / above).is_dir():
            faults.append(f"{above}: is no folder: remove it")
        elif (site / above).is_symlink():
            faults.append(f"{above}: is a symbolic link: remove it")
    faults += [
        f"{path}: is there already, and is not the release's: remove it"
        for path in bundle.added
        if os.path.lexists(site / path)
    ]
    patched = installed.dist_info_with(bundle.local)
    if patched == installed.dist_info:
        faults.append(f"{patched}: its name has another version than its METADATA")
    elif os.path.lexists(site / patched):
        faults.append(f"{patched}: is there already")
    return faults


def digest_of(site: Path, path: str) -> str:
    """Return the sha256 of a file, or what keeps it from having one."""
    place = site / path
    if os.path.realpath(place) != os.path.join(os.path.realpath(site), path):  # noqa: PTH118
        return f"is a symbolic link, to {os.path.realpath(place)}"
    if not place.is_file():
        return "is missing" if not os.path.lexists(place) else "is no file"
    return sha256(place.read_bytes())


def require_writable(site: Path, dist_info: str, paths: Iterable[str]) -> None:
    """Make sure that the files `paths`, and a metadata folder, may be exchanged or removed, with
    what Python has compiled of them; nothing is written.

    Raises:
        RefusalError: A folder is read-only.
    """
    beside = {(site / path).parent for path in paths}
    folders = {site, *beside, *(folder / "__pycache__" for folder in beside)}
    folders.update(folders_of(site / dist_info))
    closed = sorted(
        str(path) for path in folders if path.is_dir() and not os.access(path, os.W_OK | os.X_OK)
    )
    if closed:
        raise RefusalError(
            STORAGE,
            f"cannot write {closed[0]}" + (f" and {len(closed) - 1} more" if closed[1:] else ""),
            "folders that may be written",
            "run this as their owner, where the file system is not read-only",
        )


def faults_of(installed: Installed, bundle: Bundle) -> list[str]:
    """Return where what is installed is not what this installer makes; empty: nowhere.

    Modules that tell of the build differ between a wheel, a layer and this installer.
    """
    found = []
    if not installed.version.endswith(bundle.local):
        found.append(f"its version is {installed.version}")
    for path, data in bundle.files.items():
        digest = digest_of(installed.site, path)
        if digest != sha256(data):
            found.append(f"{path}: {digest}, expected {sha256(data)}")
    return found

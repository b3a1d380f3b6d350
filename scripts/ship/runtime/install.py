"""What an installer does: put the fixes into an environment, take them out, say what there is."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path

from .bundle import Bundle, sha256
from .console import PYTHON
from .installed import OVERLAY, Installed, faults_of, find_installed, require_stock
from .lock import alone, beside_readers
from .metadata import (
    SBOM_PATH,
    VERSION_MODULE,
    patched_metadata,
    patched_record,
    patched_sbom,
    patched_version,
    patched_version_module,
    provenance,
    record_row,
    record_rows,
)
from .refusal import ALREADY_PATCHED, CHECK_FAILED, RefusalError
from .switch import Exchange, exchange, is_half_done, restore, sweep, undo

# They vouch for the RECORD that was, or for where the stock build came from.
_DROPPED = ("RECORD.jws", "RECORD.p7s", "direct_url.json", "uv_cache.json")


def install(site: Path, bundle: Bundle) -> str:
    """Put the fixes in and say what was done; nothing where they are in force already.

    Raises:
        RefusalError: What is installed is not what the fixes are for.
        OSError: The folder cannot be written or is full; it is as it was.
    """
    with alone(site):
        said = ""
        if is_half_done(site):
            restore(site)
            said = "an installer was killed here: put back what there was\n"
        sweep(site)
        installed = find_installed(site)
        if installed.is_patched and not faults_of(installed, bundle):
            return f"nothing has changed: {_is(installed)}"
        require_stock(installed, bundle)
        plan = _exchange(installed, bundle)
        exchange(plan)
    changed = len(bundle.stock) + 1
    return (
        f"{said}{installed.name} {installed.version} in {site} is now "
        f"{patched_version(installed.version, bundle.local)}: {changed} files changed, "
        f"{len(plan.files) - changed} added, {len(bundle.fixes)} fixes"
    )


def take_out(site: Path) -> str:
    """Put back the stock files, byte for byte, and say so.

    Raises:
        RefusalError: There is nothing to put back, or somebody has changed a file since.
        OSError: The folder cannot be written; then this can be run again.
    """
    with alone(site):
        if is_half_done(site):
            restore(site)
        else:
            sweep(site)
            installed = find_installed(site)
            if not installed.is_patched:
                return f"nothing has changed: {_is(installed)}, which is not patched"
            if not installed.undo.is_file():
                raise RefusalError(
                    ALREADY_PATCHED,
                    f"{_is(installed)}, which no installer of this kind has put there",
                    "what this installer kept of the stock files",
                    "for a wheel, install the stock one; for a layer, take the image below it",
                )
            undo(site, installed.undo)
        return f"stock again: {_is(find_installed(site))}{_left(site)}"


def check(site: Path, bundle: Bundle) -> str:
    """Say what there is: `stock`, which the fixes can go into, or `patched`.

    Raises:
        RefusalError: It is neither, for the reason that `install` would give.
    """
    with beside_readers(site):
        if is_half_done(site):
            raise RefusalError(
                CHECK_FAILED,
                f"half done: an installer was killed in {site}",
                "all files exchanged, or none",
                "run this again without --check, or with --undo",
            )
        installed = find_installed(site)
        if not installed.is_patched:
            require_stock(installed, bundle)
            return f"stock: {_is(installed)}, and {len(bundle.fixes)} fixes can go in"
        faults = faults_of(installed, bundle)
        if faults:
            listed = "".join(f"\n  {fault}" for fault in faults)
            raise RefusalError(
                ALREADY_PATCHED,
                f"{_is(installed)}, and not what this installer makes:{listed}",
                f"{bundle.release} with {bundle.local}",
                "ask the build that is there: "
                f"cd {shlex.quote(str(site))} && {shlex.quote(PYTHON)} -m vllm_overlay --check",
            )
        return f"patched: {_is(installed)}, with {len(bundle.fixes)} fixes"


def _left(site: Path) -> str:
    """Say what lies where the fixes were, and is not theirs."""
    folder = site / OVERLAY
    if not os.path.lexists(folder):
        return ""
    found = [path for path in sorted(folder.rglob("*")) if not path.is_dir()] or [folder]
    listed = "".join(f"\n  {path.relative_to(site)}" for path in found)
    return f"\nleft there, since no installer has put it there; remove it if you like:{listed}"


def _is(installed: Installed) -> str:
    return f"{installed.site} has {installed.name} {installed.version}"


def _exchange(installed: Installed, bundle: Bundle) -> Exchange:
    """Return what makes a patched build of `installed`."""
    site, stock = installed.site, installed.version
    version = patched_version(stock, bundle.local)
    dist_info = installed.dist_info_with(bundle.local)
    record = installed.read("RECORD")
    files = {
        **bundle.files,
        VERSION_MODULE: patched_version_module(
            (site / VERSION_MODULE).read_bytes(), stock, version
        ),
    }
    # RECORD has the hash of each file that there was: all that is left of the wheel it came in.
    source = {
        "source": f"{installed.name} {stock}, as installed",
        "source_record_sha256": sha256(record),
    }
    files.update(provenance(bundle.build, files, source))
    folder = site / installed.dist_info
    found = (path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")))
    metadata = {
        name: installed.read(name)
        for name in found
        if (folder / name).is_file() and name not in (*_DROPPED, "RECORD")
    }
    metadata["METADATA"] = patched_metadata(metadata["METADATA"], version)
    metadata["INSTALLER"] = b"kvfix\n"
    metadata[SBOM_PATH] = patched_sbom(bundle.sbom, installed.name, stock, version)

    def new_record(changes: Mapping[str, bytes | None]) -> bytes:
        hashed = {row[0] for row in record_rows(record) if row[1]}
        prefix = f"{installed.dist_info}/"
        gone = {row[0] for row in record_rows(record) if row[0].startswith(prefix)}
        gone |= {path for path, data in changes.items() if data is None}
        present = {path: data for path, data in changes.items() if data is not None}
        present |= {f"{dist_info}/{name}": data for name, data in metadata.items()}
        rows = [
            # Of byte code an installer may leave out hash and size.
            [path, "", ""]
            if path.endswith(".pyc") and path not in hashed
            else record_row(path, data)
            for path, data in present.items()
        ]
        return patched_record(record, gone, [*rows, [f"{dist_info}/RECORD", "", ""]])

    return Exchange(site, installed.dist_info, dist_info, files, metadata, new_record)

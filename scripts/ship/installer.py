"""The installer: one file that any Python runs, with the difference inside and its own check.

It serves every build of the release, for whatever machine: what differs between them (metadata,
RECORD, the local version) it edits where it is installed.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from zipfile import ZIP_STORED, ZipFile, ZipInfo

from packaging.version import Version

from scripts.patchset.registry import Registry
from scripts.patchset.target import Target
from scripts.project import project
from scripts.ship.runtime.bundle import Bundle, sha256
from scripts.wheel.names import VERSION_MODULE, patched_version
from scripts.wheel.plan import Plan, sbom_of
from scripts.wheel.reader import WheelReader

PACKAGE = "kvfix_installer"
_RUNTIME = Path(__file__).parent / "runtime"
_MAIN = f"""\
import sys

if sys.version_info < (3, 10):
    sys.exit("error: this needs Python 3.10 or later, as vLLM does")
try:
    from pathlib import Path

    from {PACKAGE}.main import main

    code = main(Path(__file__).parent)
except KeyboardInterrupt:  # also while it is read
    code = 130
    sys.stderr.write("Interrupted. Nothing was left half done.\\n")
sys.exit(code)
"""
_DATE = (1980, 1, 1, 0, 0, 0)  # the first that a zip file can state


def installer_name(target: Target) -> str:
    """Return the file name: `kvfix-0.20.2+kvfix.0.1.0.pyz`."""
    version = patched_version(Version(target.release), project().version, target.choice)
    return f"kvfix-{version}.pyz"


def bundle_of(source: WheelReader, plan: Plan, target: Target, registry: Registry) -> Bundle:
    """Return what the installer of `target` holds, from what is planned for one of its wheels."""
    version = patched_version(Version(target.release), project().version, target.choice)
    varying = {VERSION_MODULE, f"{source.dist_info}/METADATA"}
    told = ("vllm_overlay/provenance/build.py", "vllm_overlay/provenance/files.py")
    changed = {path: data for path, data in plan.replaced.items() if path not in varying}
    added = {
        path: data
        for path, data in plan.added.items()
        if path not in told and not path.startswith(f"{plan.dist_info}/")
    }
    sbom = sbom_of(
        target,
        registry,
        "vllm",
        str(version),
        ancestor_version=target.release,
        ancestor_sha256=None,
    )
    return Bundle(
        release=target.release,
        local=str(version.local),
        stock={path: sha256(source.read(path)) for path in changed},
        files={**changed, **added},
        build={
            "patch_set": project().version,
            "release": target.release,
            "fixes": target.choice or "all",
        },
        fixes=list(target.series.fix_ids),
        sbom=json.loads(sbom),
    )


def installer_bytes(bundle: Bundle) -> bytes:
    """Return the installer: the same bundle gives the same bytes."""
    code = {f"{PACKAGE}/{path.name}": path.read_bytes() for path in sorted(_RUNTIME.glob("*.py"))}
    buffer = io.BytesIO(b"#!/usr/bin/env python3\n")
    buffer.seek(0, io.SEEK_END)
    with ZipFile(buffer, "a") as archive:
        for name, data in {"__main__.py": _MAIN.encode(), **code, **bundle.members()}.items():
            info = ZipInfo(name, _DATE)
            info.compress_type = ZIP_STORED  # what deflate gives depends on the zlib build
            info.create_system = 3
            info.external_attr = 0o100644 << 16
            archive.writestr(info, data)
    return buffer.getvalue()

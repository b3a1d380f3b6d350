"""A small installed vLLM, an installer for it, and what is seen of a site folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from scripts.ship.runtime.bundle import Bundle, sha256
from scripts.ship.runtime.installed import WORK
from scripts.wheel.sbom import SbomFix, build_sbom
from tests.scripts.wheels import SCRIPT, WORKER, stock_files, stock_wheel_file

FIX = SbomFix(id="1", title="it works", upstream_pr=None, kind="unofficial")
LOCAL = "kvfix.0.1.0"
OVERLAY = "vllm_overlay/__init__.py"


@cache  # hundreds of tries of an installer ask for it
def _sbom() -> bytes:
    return build_sbom(
        name="vllm",
        version=f"0.20.2+{LOCAL}",
        patch_set="0.1.0",
        release="0.20.2",
        ancestor_name="vllm",
        ancestor_version="0.20.2",
        ancestor_sha256=None,
        fixes=[FIX],
    )


def bundle(**changes: object) -> Bundle:
    """Return what an installer for the small wheel holds."""
    stock = stock_files()
    values: dict[str, object] = {
        "release": "0.20.2",
        "local": LOCAL,
        "stock": {path: sha256(stock[path]) for path in (WORKER, SCRIPT)},
        "files": {
            WORKER: b"def work():\n    return 2\n",
            SCRIPT: b"#!/bin/sh\nexit 1\n",
            OVERLAY: b'"""Overlay."""\n',
            "vllm_overlay/provenance/__init__.py": b"",
            "vllm_overlay/deep/er/worker.py": b"FIXED = True\n",
        },
        "build": {"patch_set": "0.1.0", "release": "0.20.2", "fixes": "all"},
        "fixes": ["1"],
        "sbom": json.loads(_sbom()),
    }
    return Bundle(**{**values, **changes})  # type: ignore[arg-type]


def pip_install(wheel: Path, site: Path, *options: str) -> Path:
    """Install a wheel into a folder of its own, as pip does."""
    words = [sys.executable, "-m", "pip", "--isolated", "install", "--quiet", "--no-deps"]
    words += ["--no-index", *options, "--target", str(site), str(wheel)]
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    subprocess.run(words, check=True, env=environment)
    return site


def stock_site(folder: Path, version: str = "0.20.2") -> Path:
    """Return the folder of a small stock vLLM that pip has installed and compiled."""
    return pip_install(stock_wheel_file(folder, version=version), folder / "site")


def copied(site: Path, target: Path) -> Path:
    """Return a copy of a site folder with modes, dates and owners."""
    shutil.copytree(site, target, symlinks=True)
    for path in (site, *site.rglob("*")):
        found, copy = path.lstat(), target / path.relative_to(site)
        other = copy.lstat()
        if (found.st_uid, found.st_gid) != (other.st_uid, other.st_gid):
            os.lchown(copy, found.st_uid, found.st_gid)
            if not path.is_symlink():
                copy.chmod(found.st_mode & 0o7777)
    return target


def given(site: Path, uid: int, gid: int) -> Path:
    """Return `site`, with all that is in there given to another user."""
    for path in (site, *site.rglob("*")):
        mode = path.stat().st_mode & 0o7777
        os.chown(path, uid, gid)
        path.chmod(mode)
    return site


Seen = dict[str, tuple[bytes, int, int, int, int]]


def seen(site: Path) -> Seen:
    """Return content, mode, date and owner of each file; an installer's own folder aside."""
    found: Seen = {}
    for path in sorted(site.rglob("*")):
        below = path.relative_to(site)
        if path.is_file() and WORK not in below.parts:
            facts = path.stat()
            found[below.as_posix()] = (
                path.read_bytes(), facts.st_mode, facts.st_mtime_ns, facts.st_uid, facts.st_gid
            )  # fmt: skip
    return found


def folders(site: Path) -> dict[str, tuple[int, int, int]]:
    """Return mode, user and group of each folder."""
    return {
        path.relative_to(site).as_posix(): (
            path.stat().st_mode,
            path.stat().st_uid,
            path.stat().st_gid,
        )
        for path in sorted(site.rglob("*"))
        if path.is_dir()
    }


def content(found: Seen) -> dict[str, bytes]:
    """Return the content alone; without byte code, which has a date in it."""
    return {name: each[0] for name, each in found.items() if not name.endswith(".pyc")}

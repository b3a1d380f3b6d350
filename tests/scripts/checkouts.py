"""A copy of the tools with a small vLLM to work on, and a lock, patches and cache of its own."""

from __future__ import annotations

import atexit
import compileall
import hashlib
import io
import os
import platform
import random
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import cache
from pathlib import Path

import tomli_w
from packaging.version import Version

from scripts.patchset.registry import Fix, Registry
from scripts.project import ROOT
from scripts.wheel.names import VERSION_MODULE
from tests.scripts import toys
from tests.scripts.repos import write
from tests.scripts.wheels import VERSION_TEXT, with_metadata, zip_bytes

MACHINE = platform.machine()
TAGS = f"cp38-abi3-manylinux_2_17_{MACHINE}"
NATIVE = "vllm/_C.abi3.so"


def version_module(version: str) -> bytes:
    """Return `vllm/_version.py` as a build makes it."""
    read = Version(version)
    pre = "".join(map(str, read.pre or ()))
    dev = "" if read.dev is None else f"dev{read.dev}"
    numbers = (*read.release, *filter(None, [pre, dev, read.local]))
    return VERSION_TEXT.format(version=version, numbers=numbers).encode()


def noise(size: int) -> bytes:
    """Return bytes that look like native code and cannot be compressed."""
    return b"\x7fELF" + random.Random(size).randbytes(size)  # noqa: S311


def wheel_bytes(
    texts: Mapping[str, str], *, version: str = "0.20.2", name: str = "vllm", native: int = 100_000
) -> bytes:
    """Return a wheel with these files, `vllm/_version.py` and native code."""
    files = {path: text.encode() for path, text in texts.items() if path.startswith("vllm/")}
    files |= {VERSION_MODULE: version_module(version), NATIVE: noise(native)}
    return zip_bytes(with_metadata(files, version, name))


def wheel_name(version: str = "0.20.2", name: str = "vllm") -> str:
    """Return the name of a wheel for this machine."""
    return f"{name.replace('-', '_')}-{version}-{TAGS}.whl"


def sdist_bytes(texts: Mapping[str, str], version: str) -> bytes:
    """Return a source archive with these files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for path, text in texts.items():
            info = tarfile.TarInfo(f"vllm-{version}/{path}")
            info.size = len(text.encode())
            tar.addfile(info, io.BytesIO(text.encode()))
    return buffer.getvalue()


def registry_text(registry: Registry) -> str:
    """Return `fixes.toml` for a registry."""

    def table(fix: Fix) -> dict[str, object]:
        values = {key.replace("_", "-"): value for key, value in vars(fix).items()}
        del values["upstream-tests"], values["forward-tests"]
        return {key: _toml(value) for key, value in values.items()}

    return tomli_w.dumps(
        {"author": registry.author, "fix": [table(fix) for fix in registry.fixes.values()]}
    )


def _toml(value: object) -> object:
    if isinstance(value, tuple):
        return [_toml(one) for one in value]
    return vars(value) if is_dataclass(value) else value


@dataclass
class Checkout:
    """The copy, in `folder`, and its cache."""

    folder: Path
    cache: Path

    @property
    def patches(self) -> Path:
        return self.folder / "patches"

    @property
    def dist(self) -> Path:
        return self.folder / "dist"

    def lock(self, releases: Mapping[str, Mapping[str, bytes]]) -> None:
        """Pin releases, each with its files, and put the files into the cache."""
        tables = {}
        for release, files in releases.items():
            hashes = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
            tables[release] = {"files": hashes}
            for name, data in files.items():
                path = self.cache / "files" / hashes[name] / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
        (self.patches / "upstream.lock").write_text(tomli_w.dumps(tables))

    def command(self, tool: str, *words: str | Path) -> list[str]:
        return [sys.executable, "-W", "error", "-m", f"scripts.commands.{tool}", *map(str, words)]

    def environment(self, **variables: str) -> dict[str, str]:
        """Return the environment of a user of whom nothing is known, and who has no network."""
        hidden = ("PIP_", "UV_", "KVFIX_", "GIT_", "PYTEST_")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(hidden)}
        settings = {
            "KVFIX_CACHE": str(self.cache),
            "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
            "PIP_CONFIG_FILE": os.devnull,
            "UV_NO_CONFIG": "1",
            "PYTHONPATH": str(self.folder),
            "PYTEST_ADDOPTS": " ".join(toys.FEWER_PLUGINS),
        }
        return {**kept, **settings, **variables}

    def run(
        self,
        tool: str,
        *words: str | Path,
        prefix: Sequence[str] = (),
        umask: int = -1,
        timeout: float = 120,
        preexec_fn: Callable[[], None] | None = None,
        **variables: str,
    ) -> subprocess.CompletedProcess[str]:
        """Run one of the tools as a user would, and return its end."""
        return subprocess.run(
            [*prefix, *self.command(tool, *words)],
            cwd=self.folder,
            env=self.environment(**variables),
            capture_output=True,
            text=True,
            check=False,
            umask=umask,
            preexec_fn=preexec_fn,
            timeout=timeout,
        )


def tools(folder: Path) -> Checkout:
    """Return a copy of the tools and of the overlay, without patches, and an empty cache."""
    checkout = Checkout(folder / "kvfix", folder / "cache")
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("scripts", "vllm_overlay"):
        shutil.copytree(ROOT / name, checkout.folder / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", checkout.folder)
    checkout.patches.mkdir()
    write(checkout.folder, {"records/figures.toml": "run = []\n"})
    compileall.compile_dir(checkout.folder / "scripts", quiet=2)  # once, not in every test
    return checkout


def empty_overlay(checkout: Checkout) -> None:
    """Remove all of the overlay but what is in every build."""
    for path in (checkout.folder / "vllm_overlay").iterdir():
        if path.is_dir() and path.name != "provenance":
            shutil.rmtree(path)
        elif path.is_file() and not path.name.startswith("__"):
            path.unlink()


def copied(checkout: Checkout, folder: Path) -> Checkout:
    """Return a copy of the tools as they stand, with a cache of its own."""
    shutil.copytree(checkout.folder, folder / "kvfix", symlinks=True)
    shutil.copytree(checkout.cache, folder / "cache")
    return Checkout(folder / "kvfix", folder / "cache")


def scratch() -> Path:
    """Return a folder for what is made once, and gone with this process."""
    folder, owner = Path(tempfile.mkdtemp()), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # not a fork of it
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


def small(folder: Path) -> Checkout:
    """Return a copy whose series is that of `toys`, for a small 0.20.2."""
    return copied(_small(), folder)


@cache  # dozens of tests begin with one
def _small() -> Checkout:
    folder = scratch()
    checkout = tools(folder)
    for patch in toys.series(folder).patches:
        write(checkout.patches, {patch.name: (folder / patch.name).read_bytes()})
    carried(checkout, "0.20.2")
    (checkout.patches / "fixes.toml").write_text(registry_text(toys.REGISTRY), encoding="utf-8")
    (checkout.patches / "pins.toml").write_text("")
    files = {
        "vllm-0.20.2.tar.gz": sdist_bytes(toys.FILES, "0.20.2"),
        wheel_name(): wheel_bytes(toys.FILES),
    }
    checkout.lock({"0.20.2": files})
    return checkout


def carried(checkout: Checkout, *releases: str) -> None:
    """Declare the releases that the fixes were carried to."""
    path = checkout.folder / "pyproject.toml"
    names = ", ".join(f'"{release}"' for release in releases)
    text = re.sub(r"^releases = \[[^]]*\]", f"releases = [{names}]", path.read_text(), flags=re.M)
    path.write_text(text)

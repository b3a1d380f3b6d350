"""An environment that holds one vLLM release: made once, kept below .nox/.

It is made from the pinned wheel, with uv where that is on the PATH and with venv and pip where it
is not. Of another side there is a folder with its vLLM, which hides the installed one where it is
in front of the import path: whatever differs between two runs comes from vLLM, and both can run at
once.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from packaging.specifiers import SpecifierSet

from scripts.patchset.overlay import PACKAGE, overlay_files, stamp_all
from scripts.patchset.patch import Patch, apply_patches
from scripts.project import ROOT, read_toml
from scripts.system.console import err
from scripts.system.errors import UsageError
from scripts.system.files import only_process, sha256
from scripts.system.process import run
from scripts.upstream.index import fetch
from scripts.upstream.lock import locked_release
from scripts.upstream.tree import read_source

NO_GPU = {"HUMMING_DISABLE_PARALLEL_BUILD": "1"}
"""Variables where there is none: else a package that vLLM needs since 0.22.0 starts two processes
when it is imported, 3 s of a core each, to compile kernels."""

_HAD = ExitStack()
_STAMP = "kvfix.txt"  # says what the folder in which it lies was made from


class Environment:
    """A virtual environment with vLLM `release` and what its tests need.

    Attributes:
        folder: Where it lies.
        python: Its interpreter.
        stock: The pinned wheel that it was made from.
    """

    def __init__(self, release: str) -> None:
        self.release = release
        self.folder = ROOT / ".nox" / f"vllm-{release}"
        self.python = self.folder / "bin" / "python"
        self.stock = fetch(locked_release(release).wheel_for(platform.machine()))

    def make(self) -> Environment:
        """Make the environment with the stock wheel, or take the one that is there.

        While another process has it this waits, see `have_to_itself`.

        Raises:
            CommandError: A package cannot be installed; what is there is made anew next time.
            UsageError: The release needs an override, and there is no uv.
        """
        requirements, overrides = needs(self.release)
        if overrides and not shutil.which("uv"):
            raise UsageError(
                f"vLLM {self.release} asks for what no index may have: {', '.join(overrides)} "
                "has to stand in for it, and pip cannot do that",
                expected="uv on the PATH",
                next_step="python -m pip install uv, then run the same command",
            )
        have_to_itself(self.release)
        stamp = self.folder / _STAMP
        wanted = "\n".join(self.contents())
        if stamp.is_file() and stamp.read_text() == wanted:
            return self
        err.print(f"making an environment with vLLM {self.release} (6 to 9 GB) ...")
        make_venv(self.folder)
        override = self.folder / "overrides.txt"
        override.write_text("\n".join(overrides))
        options = ("--override", override) if overrides else ()
        run([*installer(self.python), *options, self.stock, *requirements], timeout=3600)
        stamp.write_text(wanted)
        return self

    def contents(self) -> list[str]:
        """Return what the environment is made from: Python, the stock wheel, requirements."""
        requirements, overrides = needs(self.release)
        return [sys.version, str(self.stock), *requirements, *overrides]

    def install_into(
        self, folder: Path, key: str, *packages: Path | str, timeout: float = 3600
    ) -> None:
        """Install wheels or requirements, without what they need, into `folder`, which holds them.

        A folder that was made for the same `key` stays as it is. In front of the import path a
        folder with vLLM hides that of the environment.
        """
        stamp = folder / _STAMP
        if stamp.is_file() and stamp.read_text() == key:
            return
        shutil.rmtree(folder, ignore_errors=True)
        install = installer(self.python, cached=False)
        run([*install, "--no-deps", "--target", folder, *packages], timeout=timeout)
        stamp.write_text(key)

    def beside(self, name: str, wheel: Path) -> Path:
        """Return a folder of the environment with `wheel`, which hides the installed vLLM."""
        folder = self.folder / name
        self.install_into(folder, sha256(wheel), wheel)
        return folder

    def install(self, wheel: Path) -> None:
        """Exchange the installed vLLM for `wheel`; nothing else changes."""
        again = "--reinstall" if shutil.which("uv") else "--force-reinstall"
        run([*installer(self.python, cached=False), "--no-deps", again, wheel], timeout=3600)

    def variables(self, shadow: Path | None) -> dict[str, str]:
        """Return the variables under which our tests, and the `vllm` of `shadow`, are imported.

        Args:
            shadow: A folder whose `vllm` hides the installed one; None for the installed one.
        """
        folders = [str(stage())] if shadow is None else [str(shadow), str(stage())]
        # Byte code is kept even where the user's environment says no: without it each start of
        # Python spends ten seconds on compiling what vLLM and torch import.
        own = {"PYTHONPATH": os.pathsep.join(folders), "PYTHONDONTWRITEBYTECODE": ""}
        own["PYTEST_ADDOPTS"] = ""  # a choice of tests would be on record as all of them
        return {**os.environ, **NO_GPU, **own}

    def site(self) -> Path:
        """Return the folder that holds the `vllm` package."""
        result = run([self.python, "-c", "import sysconfig; print(sysconfig.get_path('platlib'))"])
        return Path(result.stdout.strip())

    def shadow(self, folder: Path, patches: Sequence[Patch]) -> Path:
        """Make a copy of the installed stock `vllm` with `patches` and what they need.

        Args:
            folder: A folder on the file system of the environment; made anew.
            patches: Applied in order to the release's own files.
        """
        texts, _ = apply_patches(patches, partial(read_source, self.release))
        changed = {path: text.encode() for path, text in stamp_all(texts, patches).items()}
        changed.update(overlay_files(patches))
        return self.shadow_of(folder, changed)

    def shadow_of(self, folder: Path, changed: Mapping[str, bytes]) -> Path:
        """Make a copy of the installed stock `vllm` in which the files `changed` are others.

        Files are hard links, so it takes a second and no space. Put the folder in front of the
        import path and it hides the installed package.

        Args:
            folder: A folder on the file system of the environment; made anew.
            changed: Content by path below the site folder.
        """
        shutil.rmtree(folder, ignore_errors=True)
        site = self.site()
        for package in ("vllm", PACKAGE):
            if (site / package).is_dir():  # with its byte code, which a link leaves valid
                shutil.copytree(site / package, folder / package, copy_function=_link)
        for path, data in changed.items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)  # the link, not the file that it shares
            target.write_bytes(data)
        return folder


def have_to_itself(release: str) -> None:
    """Wait until no other process has the environment of `release`, and keep it from others.

    What one installs is what another one's tests would import. It is this process's until that
    ends, gives it back or takes that of another release: who waits has none that others wait for.
    """
    give_back()
    # Not in the environment, which is made anew; a copy of `nox -s rebase` has our folder.
    folder = (ROOT / ".nox").resolve() / "locks" / release
    folder.mkdir(parents=True, exist_ok=True)
    _HAD.enter_context(only_process(folder, f"has the environment of {release}"))


def give_back() -> None:
    """Let other processes have the environment that this one has, if it has one."""
    _HAD.close()


def needs(release: str) -> tuple[list[str], list[str]]:
    """Return what goes beside vLLM `release`, and what overrides its own requirements.

    Both are lists of requirements, from `vllm-tests` and `[[tool.kvfix.environment]]` in
    pyproject.toml: every table whose `releases` (PEP 440) match counts.
    """
    document = read_toml(ROOT / "pyproject.toml")
    requirements = list(document["dependency-groups"]["vllm-tests"])
    overrides: list[str] = []
    for table in document["tool"]["kvfix"]["environment"]:
        if SpecifierSet(table["releases"]).contains(release):
            requirements += table.get("requirements", ())
            overrides += table.get("overrides", ())
    return requirements, overrides


def make_venv(folder: Path) -> None:
    """Make an empty virtual environment of this Python in `folder`, whatever was there."""
    shutil.rmtree(folder, ignore_errors=True)
    if uv := shutil.which("uv"):
        run([uv, "venv", "--quiet", "--seed", "--python", sys.executable, folder])
    else:
        run([sys.executable, "-m", "venv", folder])


def installer(python: Path, *, cached: bool = True) -> list[str | Path]:
    """Return the command that installs what is appended to it for `python`.

    uv keeps a wheel's files in the user's cache, 1 GB for each that is patched, and for good.
    """
    if uv := shutil.which("uv"):
        no_cache = () if cached else ("--no-cache",)
        return [uv, "pip", "install", "--quiet", *no_cache, "--python", python]
    return [python, "-m", "pip", "install", "--quiet"]


def _link(source: str, target: str) -> None:
    Path(target).hardlink_to(source)


def stage() -> Path:
    """Return a folder from which the tests can be imported, and nothing else of the repository.

    Run from the repository itself, Python would find `vllm_overlay` there rather than the one
    that was installed.
    """
    folder = ROOT / ".work" / "stage"
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "tests"
    if not link.is_symlink():
        link.symlink_to(ROOT / "tests")
    return folder

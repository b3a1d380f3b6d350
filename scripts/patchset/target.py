"""A release of vLLM as kvfix builds on it: its pinned files, its sources, and the fixes for it."""

from __future__ import annotations

import platform
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from scripts.patchset.choice import label, only, without
from scripts.patchset.patch import Patch
from scripts.patchset.registry import Registry
from scripts.patchset.series import Series, load_series
from scripts.project import supported_release
from scripts.upstream.index import fetch
from scripts.upstream.lock import LockedFile, LockedRelease, locked_release
from scripts.upstream.tree import read_source, release_tree


@dataclass(frozen=True)
class Target:
    """A pinned release that the fixes were carried to; files are fetched when asked for.

    Attributes:
        locked: its files.
        series: the fixes: all that there are for it, or what was chosen of them.
        choice: what versions say of a choice, as in `without.k10`; empty for all.
    """

    locked: LockedRelease
    series: Series
    choice: str = ""

    @classmethod
    def of(cls, release: str, registry: Registry | None = None) -> Target:
        """Return the target `release`, given in its normal form; `registry` if it was read before.

        Raises:
            NotLockedError: The release is not pinned.
            NotCarriedError: The fixes were not carried to it.
            RegistryError: The lock, the registry or one of its patches is malformed.
        """
        return cls(locked_release(release), load_series(release, registry))

    @classmethod
    def named(cls, text: str, registry: Registry | None = None) -> Target:
        """Return the target that a command line names, in any spelling of PEP 440.

        Raises:
            UnknownReleaseError: kvfix supports no such release. And what `of` raises.
        """
        return cls.of(supported_release(text), registry)

    def having(self, ids: Collection[str], registry: Registry) -> Target:
        """Return the same release with the fixes `ids` alone, and what they depend on.

        Raises:
            UsageError: One is not a fix for it.
        """
        return self._chosen(only(self.series, ids, registry), registry)

    def lacking(self, ids: Collection[str], registry: Registry) -> Target:
        """Return the same release with all fixes but `ids`.

        Raises:
            UsageError: One is not a fix for it, or another one depends on it.
        """
        return self._chosen(without(self.series, ids, registry), registry)

    def _chosen(self, series: Series, registry: Registry) -> Target:
        return replace(self, series=series, choice=label(series, self.series, registry))

    @property
    def release(self) -> str:
        """The release, in its normal form."""
        return self.locked.release

    @property
    def patches(self) -> tuple[Patch, ...]:
        """The patches for it, in the order in which they are applied."""
        return self.series.patches

    @property
    def tree(self) -> Path:
        """The unpacked sdist."""
        return release_tree(self.release)

    def read(self, path: str) -> str:
        """Return the text of a file of the sdist.

        Raises:
            RegistryError: The release has no such file.
        """
        return read_source(self.release, path)

    def wheel_for(self, arch: str | None = None) -> tuple[Path, LockedFile]:
        """Return the stock wheel for a machine, this one by default: its path, and its pin.

        Raises:
            NotLockedError: There is none, or several.
            NetworkError: It is not in the cache and the index cannot be reached.
        """
        file = self.pinned_wheel(arch)
        return fetch(file), file

    def pinned_wheel(self, arch: str | None = None) -> LockedFile:
        """Return what is pinned as the stock wheel for a machine, this one by default.

        Raises:
            NotLockedError: There is none, or several.
        """
        return self.locked.wheel_for(arch or platform.machine())

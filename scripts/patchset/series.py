"""The series of one release line: its patches, in the order in which they are applied."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from scripts.patchset.patch import Patch, read_patch
from scripts.patchset.registry import Registry
from scripts.project import PATCHES, project
from scripts.system.errors import NoLineError, RegistryError
from scripts.upstream.lock import load_lock


@dataclass(frozen=True)
class Series:
    """All patches of one line."""

    line: str
    patches: tuple[Patch, ...]

    @property
    def fix_ids(self) -> tuple[str, ...]:
        """Ids of the fixes, in order."""
        return tuple(patch.fix_id for patch in self.patches)

    def only(self, ids: Collection[str], registry: Registry) -> tuple[Patch, ...]:
        """Return the patches of the fixes `ids` and of what they depend on in this line.

        A dependency that has no patch here is one that these releases do not need.
        """
        wanted = registry.with_dependencies(set(ids))
        return tuple(patch for patch in self.patches if patch.fix_id in wanted)


def series_file(line: str) -> Path:
    """Path of the file that lists the patches of `line`."""
    return PATCHES / line / "series"


def patch_names(line: str) -> tuple[str, ...]:
    """Names in the series file of `line`; blank lines and `#` comments do not count.

    Raises:
        NoLineError: There is no such line.
    """
    path = series_file(line)
    if not path.is_file():
        lines = sorted(found.parent.name for found in PATCHES.glob("*/series"))
        raise NoLineError(
            f"no line of patches is called {line}",
            expected=f"one of {', '.join(lines)}",
            next_step="carry a line to this release as CONTRIBUTING.md says",
        )
    rows = (row.strip() for row in path.read_text(encoding="utf-8").splitlines())
    return tuple(row for row in rows if row and not row.startswith("#"))


def load_series(line: str) -> Series:
    """Read the series of `line`, for example `v0.20`.

    Raises:
        NoLineError: There is no such line.
        RegistryError: A listed patch is missing or malformed.
    """
    return Series(line, tuple(listed_patch(line, name) for name in patch_names(line)))


def listed_patch(line: str, name: str) -> Patch:
    """Read the patch `name`, which the series of `line` lists.

    Raises:
        RegistryError: It is missing or malformed.
    """
    path = PATCHES / line / name
    if not path.is_file():
        raise RegistryError(
            f"{line}/series lists {name}, which is not there",
            expected="a file for each row",
            next_step=f"correct patches/{line}/series, then: nox -s lint",
        )
    return read_patch(path)


def releases_by_line() -> dict[str, list[str]]:
    """Return the supported releases of each line that has patches, oldest first.

    The patches of a line are exported from its newest release.
    """
    lock = load_lock()
    lines: dict[str, list[str]] = {path.parent.name: [] for path in PATCHES.glob("*/series")}
    for release in sorted(project().releases, key=Version):
        if release in lock and lock[release].line in lines:
            lines[lock[release].line].append(release)
    return dict(sorted(lines.items()))

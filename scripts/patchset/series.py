"""The series of one release: its patches, in the order in which they are applied.

A fix has a folder below `patches/`. A file in it is named by the first release that it serves, and
serves every later one up to the next file's. Which releases there are is said elsewhere, once:
`pyproject.toml` names those that are carried, and `fixes.toml` those that need the fix. Nothing
else is ever patched, and a file marks no end.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from scripts.patchset.patch import Patch, read_patch
from scripts.patchset.registry import Fix, Registry, load_registry
from scripts.project import PATCHES, project
from scripts.system.errors import NotCarriedError, RegistryError
from scripts.upstream.lock import final_version, load_lock


@dataclass(frozen=True)
class Series:
    """All patches for one release; their order is that of the registry."""

    release: str
    patches: tuple[Patch, ...]

    @property
    def fix_ids(self) -> tuple[str, ...]:
        """Ids of the fixes, in order."""
        return tuple(patch.fix_id for patch in self.patches)

    def only(self, ids: Collection[str], registry: Registry) -> tuple[Patch, ...]:
        """Return the patches of the fixes `ids` and of what they depend on.

        A dependency that has no patch here is one that the release does not need.
        """
        wanted = registry.with_dependencies(set(ids))
        return tuple(patch for patch in self.patches if patch.fix_id in wanted)


def carried_releases() -> list[str]:
    """Return the releases that the fixes were carried to, and that are pinned, oldest first."""
    lock = load_lock()
    return sorted((release for release in project().releases if release in lock), key=Version)


def load_series(release: str, registry: Registry | None = None) -> Series:
    """Read the series of `release`, given in its normal form.

    Raises:
        NotCarriedError: The fixes were not carried to it.
        RegistryError: A fix that it needs has no patch, or one that is malformed.
    """
    if release not in carried_releases():
        raise NotCarriedError(
            f"the fixes were not carried to vLLM {release}",
            expected=f"one of {', '.join(carried_releases()) or '(there is none)'}",
            next_step=f"nox -s rebase -- {release}",
        )
    fixes = (registry or load_registry()).fixes.values()
    return Series(
        release,
        tuple(read_patch(patch_for(fix, release)) for fix in fixes if fix.needed_on(release)),
    )


def there_is(registry: Registry, release: str) -> tuple[Series, list[str]]:
    """Return the patches that there are for `release`, and what is missing, a sentence each."""
    patches, missing = [], []
    for fix in registry.fixes.values():
        if fix.needed_on(release):
            try:
                path = patch_for(fix, release)
            except RegistryError as error:
                missing.append(error.found)
            else:
                patches.append(read_patch(path))
    return Series(release, tuple(patches)), missing


def patch_for(fix: Fix, release: str) -> Path:
    """Return the file that serves `release`, which needs `fix`.

    Raises:
        RegistryError: There is none.
    """
    files = patch_files(fix)
    first = first_serving(files, release)
    if first is None:
        raise RegistryError(
            f"fix {fix.id} applies to {release} and has no patch",
            expected=f"a file in patches/{fix.name}/ that is named by {release} or an earlier one",
            next_step=f"nox -s edit -- {release} {fix.id}",
        )
    return files[first]


def patch_files(fix: Fix, folder: Path | None = None) -> dict[str, Path]:
    """Return the files of `fix` by the first release that each serves, oldest first.

    Args:
        fix: The fix.
        folder: Where the patches of all fixes are, `patches/` by default.

    Raises:
        RegistryError: One is not named by a release.
    """
    files: dict[Version, Path] = {}
    paths = ((folder or PATCHES) / fix.name).glob("*.patch")
    for path in sorted(paths, key=lambda path: path.stem):
        version = final_version(path.stem)
        if version is None or str(version) != path.stem or version in files:
            raise RegistryError(
                f"{fix.name}/{path.name} is not named by a release, or not by one of its own",
                expected="the first release that it serves, such as 0.20.0.patch",
                next_step=f"rename it in patches/{fix.name}, then: nox -s lint",
            )
        files[version] = path
    return {files[version].stem: files[version] for version in sorted(files)}


def first_serving(files: Collection[str], release: str) -> str | None:
    """Return which of `files`, named by their first releases, serves `release`; None: none."""
    earlier = (first for first in files if Version(first) <= Version(release))
    return max(earlier, key=Version, default=None)


def served(
    fix: Fix, files: Mapping[str, object], releases: Collection[str]
) -> dict[str, list[str]]:
    """Return, by each of `files`, those of `releases` (all that are carried) that it serves."""
    by_first: dict[str, list[str]] = {first: [] for first in files}
    for release in sorted(releases, key=Version):
        first = first_serving(files, release)
        if first is not None and fix.needed_on(release):
            by_first[first].append(release)
    return by_first

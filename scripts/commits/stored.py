"""What is stored below `patches/`: as few files as serve all releases, made from what they do.

For each fix, release by release, the question is what it makes of the release, with the fixes
before it applied. A file goes on serving as long as it makes exactly that; where it does not, the
next file begins, exported from the release that names it. So there is a file only where a diff is
new, and one that has become equal to its neighbour goes.

This is the only place that makes patch files: what they do decides every byte of them.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from packaging.version import Version

from scripts.patchset.patch import Patch, apply_patches, head, parse_patch, read_patch
from scripts.patchset.registry import Fix, Registry
from scripts.patchset.series import first_serving, patch_files, served
from scripts.project import PATCHES
from scripts.system.errors import PatchDoesNotApplyError, RegistryError
from scripts.system.files import replace_text
from scripts.system.git import Repository
from scripts.upstream.tree import read_source

_INDEX = re.compile(r"^index [0-9a-f]+\.\.[0-9a-f]+ [0-7]+\n", re.MULTILINE)


@dataclass(frozen=True)
class Change:
    """What some fixes are to make of a release from now on.

    Attributes:
        release: The release.
        patches: The new patch of each fix, by its id, as it stands in the series of the release.
        alone: Whether the other releases keep what they have. Else those that share the file
            follow, as far as the new patch applies to them.
    """

    release: str
    patches: Mapping[str, Patch]
    alone: bool


class Differ:
    """Has git compare texts, in a repository below a folder that nobody else uses."""

    def __init__(self, folder: Path) -> None:
        self._repository = Repository.init(folder)

    def diff(self, before: Mapping[str, str], after: Mapping[str, str]) -> str:
        """Return the diff between texts of the same files, by path.

        Without git's `index` lines: they would name the bytes of one release's files.
        """
        self._write(before)
        self._repository.run("add", "--all", "--force")
        self._write(after)
        text = self._repository.run(
            "diff", "--no-ext-diff", "--no-textconv", "--no-color", "--no-renames",
        )  # fmt: skip
        return _INDEX.sub("", text)

    def patch(
        self, fix: Fix, release: str, before: Mapping[str, str], after: Mapping[str, str]
    ) -> Patch:
        """Return that diff as the patch of `fix` that `release` names."""
        text = head(fix.name, [release]) + self.diff(before, after)
        return parse_patch(f"{fix.name}/{release}.patch", text)

    def _write(self, texts: Mapping[str, str]) -> None:
        for name, text in texts.items():
            path = self._repository.path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode())


def stored(
    registry: Registry,
    releases: Collection[str],
    change: Change | None = None,
    folder: Path | None = None,
) -> dict[str, str]:
    """Return the text of every patch file, by its path below `patches/`.

    Where the patch of a fix does not apply to a release, nothing is known of what it should do
    there: the file that serves the release stays.

    Args:
        registry: The fixes.
        releases: All releases that are carried.
        change: What is new; nothing by default.
        folder: Where the patches are that hold for all else, `patches/` by default.

    Raises:
        PatchDoesNotApplyError: A new patch does not apply to the release that it is for.
        RegistryError: A patch is malformed.
    """
    texts: dict[str, str] = {}
    trees = {release: _Tree(release) for release in sorted(releases, key=Version)}
    with tempfile.TemporaryDirectory() as work:
        differ = Differ(Path(work))
        for fix in registry.fixes.values():
            files = patch_files(fix, folder or PATCHES)
            current = {first: read_patch(path) for first, path in files.items()}
            results = _results(fix, current, trees, change)
            chosen = _chosen(fix, current, results, trees, differ)
            texts |= {
                patch.name: head(fix.name, served(fix, chosen, releases)[first]) + patch.diff
                for first, patch in chosen.items()
            }
            for release, after in results.items():
                trees[release].texts |= after or {}
    return texts


def write(texts: Mapping[str, str], registry: Registry, folder: Path = PATCHES) -> list[str]:
    """Make the patch files below `folder` those of `texts`; return the paths that changed.

    The newest release comes first, and what goes away last: at each moment every release has a
    file that makes the same of it.
    """
    old = [path for fix in registry.fixes.values() for path in patch_files(fix, folder).values()]
    changed = []
    for name in newest_first(texts):
        path = folder / name
        if not path.is_file() or path.read_bytes() != texts[name].encode():
            changed.append(name)
            replace_text(path, texts[name])
    for path in old:
        if (name := path.relative_to(folder).as_posix()) not in texts:
            changed.append(name)
            path.unlink()
    return sorted(changed)


def newest_first(names: Collection[str]) -> list[str]:
    """Return the paths of patch files, those of later releases before those of earlier ones."""
    return sorted(names, key=lambda name: (Version(Path(name).stem), name), reverse=True)


@dataclass
class _Tree:
    """The files of a release, and what the fixes so far have made of some of them."""

    release: str
    texts: dict[str, str] = field(default_factory=dict)

    def read(self, path: str) -> str:
        return self.texts[path] if path in self.texts else read_source(self.release, path)

    def made_by(self, patch: Patch) -> dict[str, str] | None:
        """Return the new text of each file that `patch` changes; None where it does not apply."""
        try:
            return apply_patches([patch], self.read)[0]
        except (PatchDoesNotApplyError, RegistryError):
            return None


_Results = dict[str, dict[str, str] | None]  # by release; None: the patch does not apply there


def _results(
    fix: Fix, current: Mapping[str, Patch], trees: Mapping[str, _Tree], change: Change | None
) -> _Results:
    """Return what `fix` makes of each release that needs it, oldest first."""
    results: _Results = {}
    for release, tree in trees.items():
        if fix.needed_on(release):
            first = first_serving(current, release)
            results[release] = tree.made_by(current[first]) if first else None
    if change is None or fix.id not in change.patches:
        return results
    new, edited = change.patches[fix.id], change.release
    shared, was = first_serving(current, edited), results[edited]
    for release, kept in results.items():
        together = first_serving(current, release) == shared and (was is not None or kept is None)
        if release != edited and together and not change.alone:
            results[release] = trees[release].made_by(new) or kept
    results[edited] = apply_patches([new], trees[edited].read)[0]
    return results


def _chosen(
    fix: Fix,
    current: Mapping[str, Patch],
    results: _Results,
    trees: Mapping[str, _Tree],
    differ: Differ,
) -> dict[str, Patch]:
    """Return the patches that have these results, by the first release that each serves."""
    chosen: dict[str, Patch] = {}
    now: Patch | None = None
    for release, after in results.items():
        if after is None:
            first = first_serving(current, release)
            if first is not None and first not in chosen:
                chosen[first] = now = current[first]
        elif now is None or trees[release].made_by(now) != after:
            before = {path: trees[release].read(path) for path in after}
            chosen[release] = now = differ.patch(fix, release, before, after)
    return chosen

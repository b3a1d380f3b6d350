"""What the index offers of a release, put into the lock or compared with what is there.

What is pinned is never changed: a file of the same name with another hash stops it, and a file that
the index no longer offers stays in the lock.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from functools import partial
from pathlib import Path

from packaging.version import Version

from scripts.system.console import out
from scripts.system.errors import HashMismatchError, UnknownReleaseError, UsageError
from scripts.system.files import replacing
from scripts.upstream import index
from scripts.upstream.lock import (
    DISTRIBUTION,
    LOCK,
    final_version,
    is_sdist,
    load_lock,
    read_release,
    render,
)


def lock(releases: Iterable[str], path: Path = LOCK) -> None:
    """Add each release to the lock file or check its entry, and print what changed.

    All or nothing: the file is written once, after every release was found good.

    Raises:
        UsageError: A name is no final version.
        UnknownReleaseError: The index does not have the release, or no sdist of it.
        HashMismatchError: A pinned file has another hash on the index.
        NetworkError: The index does not answer; or a source does not, and the others do not have
            all that is pinned, or no sdist.
    """
    names = dict.fromkeys(_release_name(text, path) for text in releases)
    old = load_lock(path)
    new = dict(old)
    differing: list[str] = []
    for name in names:
        pinned = old[name].hashes() if name in old else {}
        complete = partial(_complete, pinned)
        offers = {offer.name: offer for offer in index.offered(DISTRIBUTION, name, complete)}
        found = {
            offer.name: offer.sha256 or index.transferred_hash(offer) for offer in offers.values()
        }
        files = {**found, **pinned}
        if not any(map(is_sdist, files)):
            raise UnknownReleaseError(
                f"the index has no source archive of vLLM {name}; its files are: "
                f"{', '.join(files) or 'none'}",
                expected="a published release",
                next_step="correct the number, or the index settings of pip or uv",
            )
        new[name] = read_release(path, name, files)
        out.print(name, style="bold")
        for file in new[name].hashes():
            state = _state(pinned.get(file), found.get(file))
            yanked = file in offers and offers[file].yanked is not None
            out.print(f"  {state:9} {file}{' (yanked)' if yanked else ''}", markup=False)
            if state == "differs":
                differing.append(f"{file}: pinned {pinned[file]}, offered {found[file]}")
    if differing:
        raise HashMismatchError(
            "the index has other files under pinned names:\n  " + "\n  ".join(differing),
            expected="the sha256 that patches/upstream.lock pins: a published file never changes",
            next_step="find out which of the two was changed; the lock was left as it is",
        )
    if new != old:
        with replacing(path) as target:
            target.write(render(new).encode())


def _complete(pinned: Collection[str], names: Collection[str]) -> bool:
    return {*pinned} <= {*names} and any(map(is_sdist, names))


def _state(pinned: str | None, found: str | None) -> str:
    if pinned is None:
        return "added"
    if found is None:
        return "vanished"  # and kept: the release stays what it is
    return "same" if found == pinned else "differs"


def _release_name(text: str, path: Path) -> str:
    version = final_version(text)
    if version is None:
        raise UsageError(
            f"{text!r} is no final release",
            expected="a version such as 0.20.2: no pre-release, no local part",
            next_step="give its number, or check what is pinned: nox -s lock",
        )
    known = next((name for name in load_lock(path) if Version(name) == version), None)
    if known is not None:  # 0.20.2.0 is 0.20.2, and no second entry
        return known
    return f"{version}.0" if re.fullmatch(r"\d+\.\d+", str(version)) else str(version)

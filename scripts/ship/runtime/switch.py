"""Files exchanged as a whole: all of them are staged and checked before the first one moves.

Everything happens in a folder beside `vllm`. What was there before goes into `undo.zip`, which gets
its name last: from then on until it goes away the exchange is under way, and whoever comes next
puts back what was there. Killed at any moment, the environment is stock, or patched, or says so.
"""

from __future__ import annotations

import json
import os
import py_compile
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, BadZipFile, ZipFile, ZipInfo

from .bundle import sha256
from .files import (
    NOBODY_KNOWN,
    Owner,
    byte_code,
    folders_of,
    give,
    make_folder,
    move,
    owner_at,
    put_folder,
    remove_empty,
    sync,
    sync_folders,
    write,
)
from .installed import UNDO, WORK, require_writable
from .refusal import CHECK_FAILED, DIFFERS, RefusalError
from .signals import undisturbed

_MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Exchange:
    """What is to be exchanged in `site`.

    Attributes:
        site: The folder that `vllm` lies in.
        stock, patched: Names of the metadata folder, before and after.
        files: New content by path, outside the metadata folder.
        metadata: All files of the new metadata folder by path below it, without what undoes it.
        record: Returns its RECORD for what is in there besides: content by path below `site`, None
            for a file that goes.
    """

    site: Path
    stock: str
    patched: str
    files: Mapping[str, bytes]
    metadata: Mapping[str, bytes]
    record: Callable[[Mapping[str, bytes | None]], bytes]


def is_half_done(site: Path) -> bool:
    """Whether an exchange is under way in `site`, or was when its process died."""
    return (site / WORK / "undo.zip").is_file()


def sweep(site: Path) -> None:
    """Remove what an installer has left that was killed before or after the exchange."""
    if not is_half_done(site):
        shutil.rmtree(site / WORK, ignore_errors=True)


def exchange(plan: Exchange) -> None:
    """Put the new files in place, all or none.

    Raises:
        RefusalError: A folder is read-only, or a file is not what was written.
        OSError: The folder cannot be written or is full; what was there before is back.
    """
    site, work = plan.site, plan.site / WORK
    require_writable(site, plan.stock, plan.files)
    shutil.rmtree(work, ignore_errors=True)
    try:
        moves = _stage(plan, work)
        _begin(work)
        for path in moves:
            move(work / "new" / path, site / path)
            for stale in byte_code(site / path):
                stale.unlink()
        for path in _compiled(work / "new"):
            move(work / "new" / path, site / path)
        put_folder(work / "new" / plan.patched, site / plan.patched)
        shutil.rmtree(site / plan.stock)
        _read_back(plan)
        _sync(site, [*moves, f"{plan.patched}/RECORD"])
        _finish(work)
    except BaseException:
        with undisturbed():
            if is_half_done(site):
                restore(site)
            shutil.rmtree(work, ignore_errors=True)
        raise


def _stage(plan: Exchange, work: Path) -> list[str]:
    """Write all that is new, and what undoes it; return the paths in the order of their moves."""
    site, new = plan.site, work / "new"
    stock = [path for path in plan.files if (site / path).exists()]
    # What is new first: as long as nothing calls it, it does nothing.
    moves = [path for path in plan.files if path not in stock] + stock
    changes: dict[str, bytes | None] = dict(plan.files)
    kept = {path: site / path for path in stock}
    for path in moves:
        mode = _mode(site / path) if path in kept else 0o644
        write(new / path, plan.files[path], mode, owner_at(site / path))
    for path in stock:
        for found in byte_code(site / path):
            name = found.relative_to(site).as_posix()
            kept[name], changes[name] = found, None
    if any(cache_from_source(path) in kept for path in stock if path.endswith(".py")):
        # So did pip. A server that may not write there would compile all at each start.
        for path in moves:
            if path.endswith(".py"):
                name = cache_from_source(path)
                make_folder((new / name).parent)
                py_compile.compile(str(new / path), str(new / name), str(site / path), doraise=True)
                give(new / name, owner_at(site / name))
                changes[name] = (new / name).read_bytes()
    for found in sorted((site / plan.stock).rglob("*")):
        if not found.is_dir():
            kept[found.relative_to(site).as_posix()] = found
    stock_info, info = site / plan.stock, new / plan.patched
    for name, data in plan.metadata.items():
        old = stock_info / name
        mode = _mode(old) if old.exists() else 0o644
        write(info / name, data, mode, owner_at(old))
    _keep(plan, kept, work / "undo.part")
    undo_data = (work / "undo.part").read_bytes()
    write(info / UNDO, undo_data, 0o644, owner_at(stock_info))
    changes[f"{plan.patched}/{UNDO}"] = undo_data
    write(info / "RECORD", plan.record(changes), 0o644, owner_at(stock_info / "RECORD"))
    _make_alike(info, stock_info)
    return moves


def _make_alike(info: Path, stock_info: Path) -> None:
    """Give the folders of the new metadata owner and mode of the old ones; empty ones come too."""
    for old in folders_of(stock_info):
        make_folder(info / old.relative_to(stock_info))
    for folder in folders_of(info):
        old = stock_info / folder.relative_to(info)
        give(folder, owner_at(old))
        if old.is_dir():
            folder.chmod(_mode(old))


def _keep(plan: Exchange, kept: Mapping[str, Path], target: Path) -> None:
    """Write into an archive what puts back what there is."""
    manifest: dict[str, Any] = {
        "stock": plan.stock,
        "patched": plan.patched,
        "new": {path: sha256(data) for path, data in plan.files.items()},
        "kept": {},
        "folders": {
            path.relative_to(plan.site).as_posix(): _facts(path)
            for path in folders_of(plan.site / plan.stock)
        },
    }
    with ZipFile(target, "w") as archive:
        for path, place in kept.items():
            data = place.read_bytes()
            manifest["kept"][path] = {
                "sha256": sha256(data),
                "mtime_ns": place.stat().st_mtime_ns,
                **_facts(place),
            }
            archive.writestr(_member(path), data)
        archive.writestr(_member(_MANIFEST), json.dumps(manifest, indent=1))
    give(target, owner_at(plan.site))
    sync(target)


def _mode(place: Path) -> int:
    return place.stat().st_mode & 0o7777


def _facts(place: Path) -> dict[str, int]:
    uid, gid = owner_at(place)
    return {"mode": _mode(place), "uid": uid, "gid": gid}


def _owner(facts: Mapping[str, int]) -> Owner:
    return (facts["uid"], facts["gid"]) if "uid" in facts else NOBODY_KNOWN


def _member(name: str) -> ZipInfo:
    info = ZipInfo(name)  # without the clock
    info.compress_type = ZIP_DEFLATED
    return info


def undo(site: Path, kept: Path) -> None:
    """Put back what `kept`, the archive in the metadata folder, has.

    Raises:
        RefusalError: Somebody has changed a file since, or a folder is read-only; nothing is
            touched.
        OSError: The folder cannot be written; then this can be run again.
    """
    manifest = _require_unchanged(site, kept)
    require_writable(site, manifest["patched"], manifest["new"])
    work = site / WORK
    with undisturbed():
        shutil.rmtree(work, ignore_errors=True)
        try:
            write(work / "undo.part", kept.read_bytes(), 0o644, owner_at(site))
            _begin(work)
        except OSError:
            sweep(site)
            raise
        restore(site)


def restore(site: Path) -> None:
    """Put back what was there before the exchange that is under way; it may be run again.

    Raises:
        RefusalError: Somebody has changed a file since; nothing is touched.
        OSError: The folder cannot be written; then this can be run again.
    """
    with undisturbed():
        work = site / WORK
        manifest = _require_unchanged(site, work / "undo.zip")
        stock, patched = manifest["stock"], manifest["patched"]
        back = work / "back"
        for folder in (work / "new", back):  # of which nothing is needed, but perhaps the space
            shutil.rmtree(folder, ignore_errors=True)
        with ZipFile(work / "undo.zip") as archive:
            for path, facts in manifest["kept"].items():
                write(back / path, archive.read(path), facts["mode"], _owner(facts))
                os.utime(back / path, ns=(facts["mtime_ns"],) * 2)
        for path, facts in manifest.get("folders", {}).items():
            make_folder(back / path)
            give(back / path, _owner(facts))
            (back / path).chmod(facts["mode"])
        for path in manifest["new"]:
            for stale in byte_code(site / path):
                stale.unlink()
        paths = [path for path in manifest["kept"] if not path.startswith(f"{stock}/")]
        for path in paths:  # the sources before their byte code
            move(back / path, site / path)
        for path in reversed([path for path in manifest["new"] if path not in manifest["kept"]]):
            (site / path).unlink(missing_ok=True)
            remove_empty((site / path).parent, site)
        if (site / patched).is_dir():
            shutil.rmtree(site / patched)
        put_folder(back / stock, site / stock)
        _sync(site, [*paths, f"{stock}/RECORD"])
        _finish(work)


def _require_unchanged(site: Path, kept: Path) -> dict[str, Any]:
    """Return what `kept` says, if each file is as it was before or after the exchange, or gone."""
    try:
        with ZipFile(kept) as archive:
            manifest: dict[str, Any] = json.loads(archive.read(_MANIFEST))
    except (BadZipFile, KeyError, ValueError) as error:
        raise RefusalError(
            CHECK_FAILED,
            f"{kept} cannot be read: {error}",
            "what this installer kept of the stock files",
            "install the stock release again",
        ) from error
    changed = []
    for path, new in manifest["new"].items():
        known = {new, manifest["kept"].get(path, {}).get("sha256")}
        if (site / path).is_file() and sha256((site / path).read_bytes()) not in known:
            changed.append(path)
    if changed:
        raise RefusalError(
            DIFFERS,
            f"{', '.join(changed)} in {site} have been changed since",
            "the files as this installer left them",
            "save what you need of them, install the stock release again, and remove "
            f"{site / WORK} if it is there",
        )
    return manifest


def _read_back(plan: Exchange) -> None:
    wrong = [p for p, data in plan.files.items() if (plan.site / p).read_bytes() != data]
    if wrong:
        raise RefusalError(
            CHECK_FAILED,
            f"{', '.join(wrong)} in {plan.site} do not read back as written",
            "a disk that keeps what is written, and nobody else who writes there",
            "look who else does, then run this again",
        )


def _begin(work: Path) -> None:
    (work / "undo.part").replace(work / "undo.zip")  # from here on it is under way
    sync(work)


def _finish(work: Path) -> None:
    (work / "undo.zip").unlink()  # it is over
    shutil.rmtree(work, ignore_errors=True)


def _sync(site: Path, paths: list[str]) -> None:
    """Bring the renames to the disk, before the undo archive goes away."""
    sync_folders([site, *((site / path).parent for path in paths)])


def _compiled(new: Path) -> list[str]:
    return [path.relative_to(new).as_posix() for path in sorted(new.rglob("*.pyc"))]

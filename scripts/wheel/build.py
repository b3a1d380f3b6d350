"""The patched wheel: built from a stock one, unless the very same one lies there."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path

from scripts.patchset.patch import Patch
from scripts.patchset.registry import Registry, load_registry
from scripts.patchset.series import Series, load_series
from scripts.project import DIST
from scripts.system.errors import KvfixError, TouchedFileDiffersError, UsageError
from scripts.system.files import sha256
from scripts.upstream.index import fetch
from scripts.upstream.lock import LockedRelease, locked_release
from scripts.upstream.tree import read_source
from scripts.wheel.plan import Plan, plan_wheel
from scripts.wheel.reader import WheelReader
from scripts.wheel.record import verify_record
from scripts.wheel.verify import verify_against
from scripts.wheel.writer import write_wheel


def build_wheel(
    source_path: Path,
    source_sha256: str,
    release: str,
    patches: Sequence[Patch],
    registry: Registry,
    folder: Path,
) -> tuple[Path, Plan, bool]:
    """Write the patched wheel into `folder`, unless the very same one lies there.

    Returns:
        The wheel, what was planned for it, and whether it was written.

    Raises:
        CheckFailedError: The wheel that was written is not as it should be; it is removed.
    """
    with WheelReader(source_path) as source:
        plan = plan_wheel(source, source_sha256, release, patches, registry)
        target = folder / plan.file_name
        if target.is_file() and _is_done(source, target, plan):
            return target, plan, False
        folder.mkdir(parents=True, exist_ok=True)
        try:
            write_wheel(
                source, target, dist_info=plan.dist_info, replaced=plan.replaced, added=plan.added
            )
        except OSError as error:
            error.filename = error.filename or target  # a full disk does not say where
            raise
    return target, plan, True


def _is_done(source: WheelReader, target: Path, plan: Plan) -> bool:
    """Whether `target` is, byte for byte, what would be written now."""
    try:
        with WheelReader(target) as wheel:
            return not (
                verify_record(wheel, plan.written(source))
                or verify_against(source, wheel, changed=plan.replaced, added=plan.added)
            )
    except KvfixError:
        return False  # whatever it is, it is replaced


def patched_wheel(release: str) -> Path:
    """Build what `apply` builds for this machine by default, and return it."""
    locked = locked_release(release)
    file = locked.wheel_for(platform.machine())
    patches = load_series(locked.line).patches
    return build_wheel(fetch(file), file.sha256, release, patches, load_registry(), DIST)[0]


def own_wheel(path: Path, locked: LockedRelease, series: Series) -> tuple[Path, str]:
    """Check that the user's own build has the release's files wherever the series touches it."""
    if not path.is_file():
        raise UsageError(
            f"there is no file {path}",
            expected="the path of a wheel",
            next_step=f"ls {path.parent}",
        )
    digest = sha256(path)
    if digest in locked.hashes().values():
        return path, digest
    with WheelReader(path) as wheel:
        wheel.require_stock(locked.release)
        touched = {name: None for patch in series.patches for name in patch.files}
        differing = [
            name
            for name in touched
            if name not in wheel.names
            or wheel.read(name) != read_source(locked.release, name).encode()
        ]
    if differing:
        raise TouchedFileDiffersError(
            f"{path.name} has other text than vLLM {locked.release} in "
            f"{len(differing)} of the files that the series changes: {', '.join(differing)}",
            expected="each of them byte for byte as released",
            next_step="patch the sources it is built from: "
            f"nox -s apply -- {locked.release} --tree DIR",
        )
    return path, digest

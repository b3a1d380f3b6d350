"""The patched wheel: built from a stock one, unless the very same one lies there."""

from __future__ import annotations

from pathlib import Path

from scripts.patchset.registry import Registry, load_registry
from scripts.patchset.target import Target
from scripts.project import DIST
from scripts.system.errors import TouchedFileDiffersError, UsageError
from scripts.system.files import sha256, sweep
from scripts.wheel.plan import Plan, plan_wheel
from scripts.wheel.reader import WheelReader
from scripts.wheel.writer import first_difference, write_wheel


def build_wheel(
    target: Target, source_path: Path, source_sha256: str, registry: Registry, folder: Path
) -> tuple[Path, Plan, bool]:
    """Write the patched wheel of `target` into `folder`, unless the very same one lies there.

    Returns:
        The wheel, what was planned for it, and whether it was written.

    Raises:
        CheckFailedError: The wheel that was written is not as it should be; it is removed.
    """
    with WheelReader(source_path) as source:
        plan = plan_wheel(source, source_sha256, target.release, target.patches, registry)
        wheel = folder / plan.file_name
        if wheel.is_file() and _is_done(source, wheel, plan):
            sweep(wheel)
            return wheel, plan, False
        folder.mkdir(parents=True, exist_ok=True)
        try:
            write_wheel(
                source, wheel, dist_info=plan.dist_info, replaced=plan.replaced, added=plan.added
            )
        except OSError as error:
            error.filename = error.filename or wheel  # a full disk does not say where
            raise
    return wheel, plan, True


def _is_done(source: WheelReader, path: Path, plan: Plan) -> bool:
    """Whether the wheel at `path` is, byte for byte, what would be written now."""
    at = first_difference(
        source, path, dist_info=plan.dist_info, replaced=plan.replaced, added=plan.added
    )
    return at is None


def patched_wheel(release: str) -> Path:
    """Build what `apply` builds for this machine by default, and return it."""
    target = Target.of(release)
    path, pinned = target.wheel_for()
    return build_wheel(target, path, pinned.sha256, load_registry(), DIST)[0]


def own_wheel(target: Target, path: Path) -> tuple[Path, str]:
    """Check that the user's own build has the release's files wherever the series touches it."""
    if not path.is_file():
        raise UsageError(
            f"there is no file {path}",
            expected="the path of a wheel",
            next_step="name a file that exists",
        )
    digest = sha256(path)
    if digest in target.locked.hashes().values():
        return path, digest
    with WheelReader(path) as wheel:
        wheel.require_stock(target.release)
        touched = {name: None for patch in target.patches for name in patch.files}
        differing = [
            name
            for name in touched
            if name not in wheel.names or wheel.read(name) != target.read(name).encode()
        ]
    if differing:
        raise TouchedFileDiffersError(
            f"{path.name} has other text than vLLM {target.release} in "
            f"{len(differing)} of the files that the series changes: {', '.join(differing)}",
            expected="each of them byte for byte as released",
            next_step="patch the sources it is built from: "
            f"nox -s apply -- {target.release} --tree DIR",
        )
    return path, digest

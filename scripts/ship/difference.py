"""Layer and installer of a release, written into a folder unless the very same lie there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from scripts.patchset.registry import Registry
from scripts.patchset.target import Target
from scripts.ship.installer import bundle_of, installer_bytes, installer_name
from scripts.ship.layer import layer_of
from scripts.system.files import replacing, sweep
from scripts.wheel.plan import Plan, plan_wheel
from scripts.wheel.reader import WheelReader


@dataclass(frozen=True)
class Difference:
    """What was written, and what was planned for it.

    Attributes:
        layer, installer: The files.
        diff_id: The digest of the layer, as an image's configuration names it.
        plan: What sets the patched wheel apart from its source.
        written: Whether a file was; they may have been there.
    """

    layer: Path
    installer: Path
    diff_id: str
    plan: Plan
    written: bool


def write_difference(
    target: Target,
    source_path: Path,
    source_sha256: str,
    registry: Registry,
    folder: Path,
    root: str,
) -> Difference:
    """Write what sets the patched wheel apart from its source, as a layer and as an installer.

    Args:
        target: The release and the fixes.
        source_path: The stock wheel.
        source_sha256: Its sha256.
        registry: What is known of the fixes.
        folder: Where both go.
        root: The folder of an image that the wheel is installed in.

    Raises:
        PatchDoesNotApplyError: A hunk has no place, or several.
        AlreadyPatchedError, BrokenWheelError: It is no sound stock wheel.
        OSError: The folder cannot be written, or is full.
    """
    with WheelReader(source_path) as source:
        plan = plan_wheel(source, source_sha256, target, registry)
        layer = layer_of(source, plan, root)
        installer = installer_bytes(bundle_of(source, plan, target, registry))
    folder.mkdir(parents=True, exist_ok=True)
    paths = (
        folder / f"{plan.file_name.removesuffix('.whl')}.layer.tar",
        folder / installer_name(target),
    )
    written = [_written(*each) for each in zip(paths, (layer.data, installer), strict=True)]
    return Difference(*paths, layer.diff_id, plan, any(written))


def _written(path: Path, data: bytes) -> bool:
    if path.is_file() and path.read_bytes() == data:
        sweep(path)
        return False
    try:
        with replacing(path) as file:
            file.write(data)
    except OSError as error:
        error.filename = error.filename or path  # a full disk does not say where
        raise
    return True

"""What the series makes of a wheel: every member that changes or is new, before one is written.

`apply` writes it, `verify` expects it, so neither can know more than the other.
"""

from __future__ import annotations

from dataclasses import dataclass

from packaging.version import Version

from scripts.patchset.overlay import (
    build_record,
    files_record,
    overlay_files,
    provenance,
    stamp_all,
)
from scripts.patchset.patch import Offset, apply_patches
from scripts.patchset.registry import Fix, Registry
from scripts.patchset.target import Target
from scripts.project import project
from scripts.wheel.names import (
    VERSION_MODULE,
    dist_info_folder,
    patched_metadata,
    patched_version,
    patched_version_module,
)
from scripts.wheel.reader import WheelReader
from scripts.wheel.sbom import SBOM_PATH, SbomFix, build_sbom


@dataclass(frozen=True)
class Plan:
    """All that sets a patched wheel apart from its source.

    `replaced` has the new content by path in the source, `added` by path in the result.
    """

    file_name: str
    version: Version
    dist_info: str
    replaced: dict[str, bytes]
    added: dict[str, bytes]
    offsets: tuple[Offset, ...]


def plan_wheel(source: WheelReader, source_sha256: str, target: Target, registry: Registry) -> Plan:
    """Return what the patches of `target` make of `source`; nothing is written.

    Raises:
        AlreadyPatchedError: The wheel carries kvfix.
        PatchDoesNotApplyError: A hunk has no place, or several.
        BrokenWheelError: A member that is read is damaged.
    """
    source.require_unpatched()
    patches = target.patches
    texts, offsets = apply_patches(patches, lambda path: source.read(path).decode("utf-8"))
    version = patched_version(source.version, project().version, target.choice)
    dist_info = dist_info_folder(source.distribution, version)
    metadata = f"{source.dist_info}/METADATA"
    patched = {path: text.encode() for path, text in stamp_all(texts, patches).items()}
    patched[VERSION_MODULE] = patched_version_module(
        source.read(VERSION_MODULE), source.version, version
    )
    fixes = [registry.fix(patch.fix_id) for patch in patches]
    added = overlay_files(patches)
    added.update(map(provenance, fixes))
    made_from = {
        "patch_set": project().version,
        "release": target.release,
        "fixes": target.choice or "all",
        "source": source.path.name,
        "source_sha256": source_sha256,
    }
    added.update([build_record(made_from)])
    added.update([files_record({**patched, **added})])
    added[f"{dist_info}/{SBOM_PATH}"] = sbom_of(
        target,
        registry,
        source.distribution,
        str(version),
        ancestor_version=str(source.version),
        ancestor_sha256=source_sha256,
    )
    return Plan(
        file_name=str(source.file_name.with_version(version)),
        version=version,
        dist_info=dist_info,
        replaced={**patched, metadata: patched_metadata(source.read(metadata), version)},
        added=added,
        offsets=tuple(offsets),
    )


def sbom_of(
    target: Target,
    registry: Registry,
    name: str,
    version: str,
    *,
    ancestor_version: str,
    ancestor_sha256: str | None,
) -> bytes:
    """Return the SBOM of the distribution `name` with the fixes of `target` in it.

    Args:
        target: The release and the fixes.
        registry: What is known of the fixes.
        name: The distribution, before and after.
        version: Its version with the fixes.
        ancestor_version: Its version without.
        ancestor_sha256: Of the wheel that was patched; None where that is not known.
    """
    return build_sbom(
        name=name,
        version=version,
        patch_set=project().version,
        release=target.release,
        ancestor_name=name,
        ancestor_version=ancestor_version,
        ancestor_sha256=ancestor_sha256,
        fixes=[_sbom_fix(registry.fix(patch.fix_id)) for patch in target.patches],
    )


def _sbom_fix(fix: Fix) -> SbomFix:
    return SbomFix(
        id=fix.id,
        title=fix.title,
        upstream_pr=fix.upstream_url or None,
        kind="backport" if fix.kind == "backport" else "unofficial",
    )

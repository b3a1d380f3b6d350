"""Which defects of the registry a build has: a release, a stock wheel, or a patched one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from scripts.patchset.choice import ALWAYS
from scripts.patchset.patch import read_patch
from scripts.patchset.registry import Fix, Registry
from scripts.patchset.series import patch_for
from scripts.prove.status import HAVING, State, release_cells
from scripts.system.errors import NotLockedError, RegistryError
from scripts.system.files import sha256
from scripts.upstream.lock import load_lock
from scripts.wheel.build import difference
from scripts.wheel.names import is_patched
from scripts.wheel.reader import WheelReader
from scripts.wheel.sbom import SBOM_PATH, read_sbom


class Has(str, Enum):
    """Whether a build has a defect."""

    PROVEN = "has it"  # its tests fail on that release's stock wheel
    LIKELY = "likely"  # by the texts, or by tests that have changed since
    UNKNOWN = "cannot say"  # its sources are not the release's there, or nothing on record tells


@dataclass(frozen=True)
class Defect:
    """A defect that a build has, or may have.

    Attributes:
        fix: the fix for it.
        has: whether the build has it.
        why: how that is known.
        patched: whether kvfix has a patch for it there.
    """

    fix: Fix
    has: Has
    why: str
    patched: bool


@dataclass(frozen=True)
class Audit:
    """What was looked at, which release it is a build of, what is fixed in it, and what is not."""

    name: str
    release: str
    inside: tuple[str, ...]
    defects: tuple[Defect, ...]


def audit_release(release: str, registry: Registry) -> Audit:
    """Audit the stock build of a pinned `release`, given in its normal form."""
    return Audit(f"vLLM {release}", release, (), tuple(_defects(release, registry)))


def audit_wheel(path: Path, registry: Registry) -> Audit:
    """Audit the wheel at `path`: pinned, of one's own, or patched.

    Raises:
        BrokenWheelError: It is no sound wheel.
        NotLockedError: It is a build of a release that is not pinned.
        UsageError: It is no build of vLLM, or there is no such file.
    """
    with WheelReader(path) as wheel:
        wheel.require_vllm()
        inside: tuple[str, ...] = ()
        pinned = True  # as what a patched one was made from
        if is_patched(wheel.version):
            sbom = read_sbom(wheel.read(f"{wheel.dist_info}/{SBOM_PATH}"))
            inside, release = tuple(fix.id for fix in sbom.fixes), sbom.release
            _require_pinned(release, wheel)
        else:
            release, pinned = _release_of(wheel, sha256(path))
        found = [
            one for one in _defects(release, registry) if one.fix.closed_by(release) not in inside
        ]
        if not pinned:
            found = [_in_own_sources(one, wheel, release, registry) for one in found]
        return Audit(wheel.name, release, inside, tuple(found))


def _release_of(wheel: WheelReader, digest: str) -> tuple[str, bool]:
    """Return the release that a wheel is a build of, and whether it is the pinned file."""
    for name, one in load_lock().items():
        if digest in one.hashes().values():
            return name, True
    release = wheel.version.base_version
    _require_pinned(release, wheel)
    return release, False


def _require_pinned(release: str, wheel: WheelReader) -> None:
    lock = load_lock()
    if release not in lock:
        raise NotLockedError(
            f"{wheel.name} is a build of {release}, which is not pinned",
            expected=f"a build of one of {', '.join(lock)}",
            next_step=f"pin it, if the index has it: nox -s lock -- {release}",
        )


def _defects(release: str, registry: Registry) -> Iterator[Defect]:
    for fix_id, cell in release_cells(release, registry, {}).items():
        if fix_id != ALWAYS and cell.state in (*HAVING, State.UNPROVEN):
            if cell.state is State.UNPROVEN:
                has = Has.UNKNOWN
            else:
                has = Has.PROVEN if cell.proven else Has.LIKELY
            yield Defect(registry.fix(fix_id), has, cell.why[0], cell.state is State.PATCHED)


def _in_own_sources(defect: Defect, wheel: WheelReader, release: str, registry: Registry) -> Defect:
    """Return what is known where only the files that the fix changes can be compared."""
    try:
        closing = registry.fix(defect.fix.closed_by(release))
        touched = read_patch(patch_for(closing, release)).files
    except RegistryError:
        return Defect(defect.fix, Has.UNKNOWN, "there is no patch that names its files", False)
    for name in touched:
        if difference(wheel, release, name):
            return Defect(defect.fix, Has.UNKNOWN, f"{name} is not the release's", defect.patched)
    return defect

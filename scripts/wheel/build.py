"""The patched wheel: built from a stock one, unless the very same one lies there."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from shlex import quote

from packaging.version import Version

from scripts.patchset.registry import Registry, load_registry
from scripts.patchset.target import Target
from scripts.project import DIST
from scripts.system.errors import TouchedFileDiffersError, UsageError, WrongReleaseError
from scripts.system.files import sha256, sweep
from scripts.upstream.index import fetch_and
from scripts.upstream.lock import LockedFile, final_version
from scripts.upstream.tree import read_source
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
        return _write(source, plan_wheel(source, source_sha256, target, registry), folder)


def build_pinned(
    target: Target, pinned: LockedFile, registry: Registry, folder: Path
) -> tuple[Path, Plan, bool]:
    """Do what `build_wheel` does with a pinned wheel, which is hashed while it is planned.

    Raises:
        KvfixError: As `build_wheel`, and `fetch`.
    """
    with ExitStack() as opened:

        def plan(path: Path) -> tuple[WheelReader, Plan]:
            source = opened.enter_context(WheelReader(path))
            return source, plan_wheel(source, pinned.sha256, target, registry)

        return _write(*fetch_and(pinned, plan), folder)


def _write(source: WheelReader, plan: Plan, folder: Path) -> tuple[Path, Plan, bool]:
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
    registry = load_registry()
    target = Target.of(release, registry)
    return build_pinned(target, target.pinned_wheel(), registry, DIST)[0]


def own_wheel(target: Target, path: Path) -> tuple[Path, str]:
    """Check that the user's own build has the release's files wherever the series touches it.

    Any build has: for another platform, with a local version, or a nightly one of the release's
    branch, whose version no release has.

    Returns:
        The build, and its sha256.

    Raises:
        UsageError: There is no such file.
        WrongReleaseError: It is another release.
        TouchedFileDiffersError: It is a build of other sources.
        AlreadyPatchedError: It carries kvfix.
        BrokenWheelError: It is no sound wheel.
    """
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
        wheel.require_unpatched()
        public = wheel.version.public
        if final_version(public) not in (None, Version(target.release)):
            raise WrongReleaseError(
                f"{wheel.name} is release {public}",
                expected=f"a build of {target.release}",
                next_step="name its own release: nox -s apply -- "
                f"{public} --wheel {quote(str(path))}",
            )
        touched = {name: None for patch in target.patches for name in patch.files}
        differing = [*filter(None, (difference(wheel, target.release, name) for name in touched))]
    if differing:
        raise TouchedFileDiffersError(
            f"{path.name} has other text than vLLM {target.release} in "
            f"{len(differing)} of the {len(touched)} files that the series changes: "
            f"{', '.join(differing)}",
            expected="each of them byte for byte as released",
            next_step="patch the sources it is built from: "
            f"nox -s apply -- {target.release} --tree DIR",
        )
    return path, digest


def difference(wheel: WheelReader, release: str, name: str) -> str:
    """Return the name of a file and how it differs from the release's; empty where it does not."""
    if name not in wheel.names:
        return f"{name} (is missing)"
    found, released = wheel.read(name), read_source(release, name).encode()
    if found == released:
        return ""
    ours, theirs = found.splitlines(), released.splitlines()
    pairs = enumerate(zip(ours, theirs, strict=False), 1)
    line = next((n for n, (one, other) in pairs if one != other), min(len(ours), len(theirs)) + 1)
    return f"{name} (from line {line} on, {len(ours)} lines for {len(theirs)})"

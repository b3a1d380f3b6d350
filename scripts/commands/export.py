"""`nox -s export`: the fixes for other forks of vLLM, as mboxes and as git branches.

    nox -s export -- 0.20.2                 dist/export-0.20.2/: mboxes and a git bundle
    nox -s export -- 0.20.2 --into DIR      branch kvfix/v0.20.2 on top of HEAD in your own clone
    nox -s export -- 0.20.2 --prove         runs each commit's tests, and a fork's own build
    nox -s export -- 0.20.2 --fix 40449     these fixes only, and what they depend on; repeatable

Each commit holds the hooks of one fix, the overlay files that it is the first to need, and its
provenance. On branch kvfix/v<release> a fix builds on those before it: they share overlay files,
and the line near the top of a changed file that names them. To be taken alone, each fix has a
branch kvfix/v<release>-<id> besides, with its dependencies and itself on top of the stock release.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from scripts.commits.bundle import write_export
from scripts.commits.clone import apply_to_tree
from scripts.commits.fixes import branch_name
from scripts.patchset.choice import fix_ids
from scripts.patchset.listing import list_fixes
from scripts.patchset.patch import Patch
from scripts.patchset.registry import Registry, load_registry
from scripts.patchset.target import Target
from scripts.project import DIST, project
from scripts.prove.export import prove_export
from scripts.system.console import entry, err, out, parser_of
from scripts.system.errors import CheckFailedError, UsageError


def main() -> None:
    """Write what the command line asks for."""
    options = _arguments()
    target, registry = Target.named(options.release), load_registry()
    release = target.release
    patches = _selected(target, options.fix, registry)
    if options.into is not None:
        branch = branch_name(release)
        offsets = apply_to_tree(options.into, branch, release, patches, registry)
        out.print(f"wrote branch {branch} in {options.into}", style="bold", markup=False)
        list_fixes(patches, registry, offsets)
        out.print(f"use it: git -C {quote(str(options.into))} switch {branch}", markup=False)
        return
    if options.prove:
        _prove(release, patches, registry)
        return
    folder = options.out or DIST / f"export-{release}"
    written = write_export(release, patches, registry, folder)
    verb = "wrote" if written else "nothing has changed: there already is"
    out.print(f"{verb} {folder}", style="bold", markup=False)
    list_fixes(patches, registry, ())
    out.print(f"use it: {folder / 'README.md'} says how", markup=False)


def _prove(release: str, patches: Sequence[Patch], registry: Registry) -> None:
    faults = prove_export(release, patches, registry)
    for fault in faults:
        err.print(f"✗ {fault}", markup=False)
    if faults:
        raise CheckFailedError(
            f"{len(faults)} faults",
            expected="each commit makes its own tests pass; the build has the files of `apply`",
            next_step=f"see reports/export-{release}.json",
        )
    out.print(f"each of {len(patches)} commits makes its own tests pass, and the fork builds")


def _selected(target: Target, ids: Sequence[str] | None, registry: Registry) -> tuple[Patch, ...]:
    series = target.series
    if unknown := set(ids or ()) - {*series.fix_ids}:
        raise UsageError(
            f"the line of {target.release} has no fix {', '.join(sorted(unknown))}",
            expected=f"some of {', '.join(series.fix_ids)}",
            next_step=f"nox -s export -- {target.release}",
        )
    return series.only(ids, registry) if ids else series.patches


def _arguments() -> argparse.Namespace:
    parser = parser_of("export", __doc__)
    parser.add_argument("release", nargs="?", default=project().default_release)
    parser.add_argument(
        "--fix", action="extend", type=fix_ids, metavar="ID,…", help="only these; repeatable"
    )
    target = parser.add_mutually_exclusive_group()
    target.add_argument("--into", type=Path, metavar="DIR", help="a clone of vLLM or of a fork")
    target.add_argument("--prove", action="store_true", help="run each commit, and a build")
    target.add_argument("--out", type=Path, metavar="DIR", help="a folder that is not there yet")
    return parser.parse_args()


if __name__ == "__main__":
    entry(main)

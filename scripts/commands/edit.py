"""`nox -s edit -- RELEASE FIX`: one fix in a worktree, and its patch written back from there.

    nox -s edit -- 0.20.2 40449      a git worktree below .work/ with the series up to the fix
    nox -s edit -- --continue        writes the patch from what the worktree holds now
    nox -s edit -- --abort           removes the worktree
    nox -s edit -- --restamp         exports all patches anew, after a change of the registry

For a fix that has no patch in the line yet, the worktree holds the whole series and the patch
goes to its end. The message is made from `patches/fixes.toml`, so that entry comes first.
Edit the release that the line's patches are exported from, the newest one; `nox -s lint` tells
whether the patch applies to the others.
"""

from __future__ import annotations

import argparse
import shutil

from scripts.commits.worktree import WORKTREE, an_edit, finish, restamp, start
from scripts.patchset.target import Target
from scripts.system.console import entry
from scripts.system.errors import UsageError


def main() -> None:
    """Run the step that the command line names."""
    parser = argparse.ArgumentParser(
        prog="nox -s edit --",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("release", nargs="?")
    parser.add_argument("fix", nargs="?")
    step = parser.add_mutually_exclusive_group()
    step.add_argument("--continue", dest="finish", action="store_true")
    step.add_argument("--abort", action="store_true")
    step.add_argument("--restamp", action="store_true", help="make all messages anew")
    options = parser.parse_args()
    if options.abort:
        shutil.rmtree(WORKTREE, ignore_errors=True)
    elif options.finish:
        finish()
    elif options.restamp:
        restamp()
    elif options.release and options.fix:
        start(Target.named(options.release), options.fix)
    else:
        raise UsageError(
            "no release and fix to edit",
            expected="a release and a fix, or --continue, or --abort",
            next_step=f"for example: nox -s edit -- {an_edit()}",
        )


if __name__ == "__main__":
    entry(main)

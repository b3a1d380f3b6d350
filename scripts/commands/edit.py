"""`nox -s edit -- RELEASE FIX`: one fix in a worktree, and its patch written back from there.

    nox -s edit -- 0.20.2 40449      a git worktree below .work/ with the series up to the fix
    nox -s edit -- --continue        writes the patch from what the worktree holds now
    nox -s edit -- --abort           removes the worktree
    nox -s edit -- --restamp         makes all patch files and documents anew

The releases that share the patch file follow the edit where the new patch applies to them, and
keep what they have where it does not; `--continue` says which. `--only` edits the named release
alone. A file is written only where its diff is new, and one that has become equal to its neighbour
is removed. A fix that has no patch yet needs its table in `patches/fixes.toml` first.
"""

from __future__ import annotations

from scripts.commits.worktree import an_edit, finish, forget, restamp, start
from scripts.project import supported_release
from scripts.system.console import entry, out, parser_of
from scripts.system.errors import UsageError


def main() -> None:
    """Run the step that the command line names."""
    parser = parser_of("edit", __doc__)
    parser.add_argument("release", nargs="?")
    parser.add_argument("fix", nargs="?", type=str.upper)
    parser.add_argument("--only", action="store_true", help="this release alone")
    step = parser.add_mutually_exclusive_group()
    step.add_argument("--continue", dest="finish", action="store_true")
    step.add_argument("--abort", action="store_true")
    step.add_argument("--restamp", action="store_true", help="make all files anew")
    options = parser.parse_args()
    if options.abort:
        out.print("The edit is given up." if forget() else "There is no edit to give up.")
    elif options.finish:
        finish()
    elif options.restamp:
        restamp()
    elif options.release and options.fix:
        start(supported_release(options.release), options.fix, alone=options.only)
    else:
        raise UsageError(
            "no release and fix to edit",
            expected="a release and a fix, or --continue, or --abort",
            next_step=f"for example: nox -s edit -- {an_edit()}",
        )


if __name__ == "__main__":
    entry(main)

"""`nox -s rebase -- RELEASE`: the fixes of the nearest releases, carried to another.

    nox -s rebase -- 0.22.1                 carry, prove, land
    nox -s rebase -- 0.22.1 --from 0.20.2   from this one and no other
    nox -s rebase -- 0.22.1 --dry-run       say what would become of each fix; run and write nothing
    nox -s rebase -- --continue             after a conflict, a failed proof, or a kill
    nox -s rebase -- --skip                 leave out the fix that it stopped at
    nox -s rebase -- --abort                give up; what tests have shown stays on record

First the tests of every fix run on the stock release, unless they are on record for it: a fix
whose tests pass there is not carried. The others start from the nearest release below or above,
whichever has more hunks that apply exactly; a fix that has no patch there, or collides, comes from
the other side if it is carried from that. They are merged three ways, one commit each, in a
worktree below `.work/rebase/`. Where a person has to look it stops there. What was carried is
exported into a copy of this repository, linted, proven by the regression tests and simulated there,
and only then put into place here.

`--upstream URL-or-path` takes the releases from a clone of vLLM with its tags rather than from the
pinned sdists; its history then tells which commits name a fix's pull request. The proof is the
same: patches have to apply to the pinned sdist, and tests run on the pinned wheel.
"""

from __future__ import annotations

from packaging.version import InvalidVersion, Version

from scripts.carry.rebase import resume, start
from scripts.carry.state import WORK, forget, not_carried
from scripts.carry.tables import table
from scripts.carry.trial import neighbours, start_of, try_all
from scripts.patchset.registry import load_registry
from scripts.patchset.series import load_series
from scripts.project import supported_release
from scripts.prove.stock import on_record
from scripts.system.console import entry, out, parser_of
from scripts.system.errors import UsageError
from scripts.system.files import only_process
from scripts.upstream.history import upstream
from scripts.upstream.lock import locked_release


def main() -> None:
    """Run the step that the command line names."""
    parser = parser_of("rebase", __doc__)
    parser.add_argument("release", nargs="?")
    parser.add_argument("--from", dest="source", metavar="RELEASE")
    parser.add_argument("--upstream", metavar="URL-OR-PATH")
    step = parser.add_mutually_exclusive_group()
    step.add_argument("--dry-run", action="store_true")
    step.add_argument("--continue", dest="go_on", action="store_true")
    step.add_argument("--skip", action="store_true")
    step.add_argument("--abort", action="store_true")
    options = parser.parse_args()
    WORK.parent.mkdir(exist_ok=True)
    with only_process(WORK.parent, "rebases in this checkout"):
        if options.abort:
            forget()
        elif options.go_on or options.skip:
            resume(skip=options.skip)
        elif options.release is None:
            raise UsageError(
                "no release to carry the fixes to",
                expected="a release, or --continue, --skip or --abort",
                next_step=f"see what it would do: nox -s rebase -- {not_carried()} --dry-run",
            )
        elif options.dry_run:
            release = _release(options.release)
            named = neighbours(release, _source(options.source))
            registry, releases = load_registry(), upstream(options.upstream)
            said = on_record(release, list(registry.fixes.values()))
            sources = [load_series(one) for one in named]
            begin = start_of(releases, sources, release, registry, said)
            trial = try_all(releases, begin.series, release, registry, said)
            out.print(begin.why, markup=False)
            out.print(table(release, trial.results))
        else:
            start(_release(options.release), _source(options.source), options.upstream)


def _source(text: str | None) -> str | None:
    return None if text is None else supported_release(text)


def _release(text: str) -> str:
    try:
        return locked_release(str(Version(text))).release
    except InvalidVersion as error:
        raise UsageError(
            f"{text!r} is no release",
            expected="a version such as 0.22.1",
            next_step=f"see what it would do: nox -s rebase -- {not_carried()} --dry-run",
        ) from error


if __name__ == "__main__":
    entry(main)

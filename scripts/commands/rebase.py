"""`nox -s rebase -- RELEASE`: the fixes of the nearest line, carried to another release.

    nox -s rebase -- 0.22.1                 carry, prove, land
    nox -s rebase -- 0.22.1 --from v0.20    from another line than the nearest
    nox -s rebase -- 0.22.1 --dry-run       say what would become of each fix; run and write nothing
    nox -s rebase -- --continue             after a conflict, a failed proof, or a kill
    nox -s rebase -- --skip                 leave out the fix that it stopped at
    nox -s rebase -- --abort                give up; what tests have shown stays on record

First the tests of every fix run on the stock release, unless they are on record for it: a fix
whose tests pass there is not carried. The others are merged three ways, one commit each, in a
worktree below `.work/rebase/`. Where a person has to look it stops there. What was carried is
exported into a copy of this repository, linted and proven by the regression tests there, and only
then put into place here.

`--upstream URL-or-path` takes the releases from a clone of vLLM with its tags rather than from the
pinned sdists; its history then tells which commits name a fix's pull request. The proof is the
same: patches have to apply to the pinned sdist, and tests run on the pinned wheel.
"""

from __future__ import annotations

import argparse
import ast
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from packaging.version import InvalidVersion, Version
from rich.markup import escape
from rich.table import Column, Table

from scripts import landing
from scripts.commits.patches import DATE, commit_hooks
from scripts.commits.worktree import changed_files
from scripts.patchset.registry import Fix, Registry, load_registry
from scripts.patchset.series import Series, load_series, releases_by_line
from scripts.project import ROOT
from scripts.prove.stock import Stock, ask_stock, on_record
from scripts.rebase_state import STATE, WORK, Phase, Result, State, load_state
from scripts.system.console import entry, err, out
from scripts.system.errors import NeedsPersonError, NoLineError, UsageError
from scripts.system.files import only_process
from scripts.system.git import Repository
from scripts.threeway import Carried, How, Source, Status, carry
from scripts.upstream.history import Upstream, upstream
from scripts.upstream.lock import locked_release

TREE = WORK / "tree"
_MARKERS = ("<<<<<<< vLLM ", "||||||| where ", ">>>>>>> ")


def main() -> None:
    """Run the step that the command line names."""
    parser = argparse.ArgumentParser(
        prog="nox -s rebase --",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("release", nargs="?")
    parser.add_argument("--from", dest="line", metavar="LINE")
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
            shutil.rmtree(WORK, ignore_errors=True)
        elif options.go_on or options.skip:
            resume(skip=options.skip)
        elif options.release is None:
            raise UsageError(
                "no release to carry the fixes to",
                expected="a release, or --continue, --skip or --abort",
                next_step="nox -s rebase -- 0.22.1",
            )
        elif options.dry_run:
            release = _release(options.release)
            line, source = nearest(release, options.line)
            registry = load_registry()
            said = on_record(release, list(registry.fixes.values()))
            trial = try_all(
                upstream(options.upstream), load_series(line), source, release, registry, said
            )
            out.print(table(release, trial.results))
        else:
            start(_release(options.release), options.line, options.upstream)


def _release(text: str) -> str:
    try:
        return locked_release(str(Version(text))).release
    except InvalidVersion as error:
        raise UsageError(
            f"{text!r} is no release",
            expected="a version such as 0.22.1",
            next_step="nox -s rebase -- 0.22.1",
        ) from error


def nearest(release: str, line: str | None = None) -> tuple[str, str]:
    """Return the line to carry from, and the release that its patches are exported from.

    It is the release's own line where that has patches, else the one below, else the one above.

    Args:
        release: A pinned release.
        line: A line that is to be taken instead.

    Raises:
        NoLineError: There is no such line, or none at all.
    """
    lines = {name: served for name, served in releases_by_line().items() if served}
    if line is None:
        line = locked_release(release).line
        if line not in lines and lines:
            newest = {Version(served[-1]): name for name, served in lines.items()}
            below = [version for version in newest if version < Version(release)]
            line = newest[max(below) if below else min(newest)]
    if line not in lines:
        raise NoLineError(
            f"no release is served by a line called {line}",
            expected=f"one of {', '.join(lines) or '(there is none)'}",
            next_step=f"nox -s rebase -- {release}",
        )
    return line, lines[line][-1]


def start(release: str, line: str | None, origin: str | None) -> None:
    """Begin to carry the fixes of `line`, or of the nearest one, to `release`.

    Raises:
        UsageError: Another rebase is not finished.
        NeedsPersonError: A fix cannot be carried by text alone.
        CheckFailedError: What was carried does not pass lint or the regression tests.
    """
    if STATE.is_file():
        raise UsageError(
            f"{WORK.relative_to(ROOT)} holds a rebase that is not finished",
            expected="none",
            next_step="nox -s rebase -- --continue, or: nox -s rebase -- --abort",
        )
    shutil.rmtree(WORK, ignore_errors=True)  # of a start that was killed
    line, source = nearest(release, line)
    registry = load_registry()
    _make_tree(upstream(origin), load_series(line), registry, source, release)
    stock = ask_stock(release, list(registry.fixes.values()))
    state = State(release, line, source, origin, stock)
    state.save()
    _go_on(state)


def _make_tree(
    releases: Upstream, series: Series, registry: Registry, source: str, release: str
) -> None:
    """Check `release` out; beside it, as tags `fix/<id>`, lie the fixes as they are on `source`."""
    tags = [releases.tag(source), releases.tag(release)]
    repository = Repository.init(TREE)
    specs = [f"refs/tags/{tag}:refs/tags/{tag}" for tag in tags]
    bare = str(releases.repository.path)
    repository.run("fetch", "--quiet", "--no-tags", "--depth=1", bare, *specs)
    commits = commit_hooks(repository, tags[0], series.patches, registry)
    for patch, commit in zip(series.patches, commits, strict=True):
        repository.run("tag", f"fix/{patch.fix_id}", commit)
    repository.run("checkout", "--quiet", "--detach", tags[1])


def resume(*, skip: bool = False) -> None:
    """Go on with the rebase, after a person's work or a kill.

    Args:
        skip: Leave out the fix that it stopped at.

    Raises:
        UsageError: There is no rebase, no fix to leave out, or one that is not resolved.
        NeedsPersonError: Another fix cannot be carried by text alone.
        CheckFailedError: What was carried does not pass lint or the regression tests.
    """
    state = load_state()
    repository = Repository(TREE)
    stopped = state.stopped
    if stopped is None and skip:
        raise UsageError(
            "it did not stop at a fix, so there is none to leave out",
            expected="a fix that needs a person",
            next_step="nox -s rebase -- --continue",
        )
    if stopped is not None:
        if skip:
            repository.run("reset", "--quiet", "--hard")
        else:
            _commit_resolution(repository, stopped.fix)
        status = Status.SKIPPED if skip else Status.RESOLVED
        hints = (*stopped.hints, f"it stopped: {stopped.status.value}")
        state.results.append(Result(stopped.fix, status, stopped.proof, hints))
        state.stopped = None
        state.save()
    elif state.phase is Phase.CARRYING:  # killed: what was not recorded is carried anew
        known = {result.fix for result in state.results}
        unknown = [fix for fix in commits_by_fix(repository) if fix not in known]
        repository.run("reset", "--quiet", "--hard", "HEAD^" if unknown else "HEAD")
    _go_on(state)


def _commit_resolution(repository: Repository, fix_id: str) -> None:
    """Commit what a person has made of a fix, unless that was done and then killed.

    Raises:
        UsageError: There are markers left, files that are no Python, or nothing at all.
    """
    if fix_id in commits_by_fix(repository):
        return
    changed = changed_files(repository)
    unready = [f"{path}: {why}" for path in changed for why in _unready(TREE / path)]
    if unready or not changed:
        raise UsageError(
            "; ".join(unready) or f"the worktree changes nothing, so fix {fix_id} would be empty",
            expected="the fix as this release needs it, without markers",
            next_step=f"edit {TREE.relative_to(ROOT)}/vllm, then: nox -s rebase -- --continue; "
            "or leave the fix out: nox -s rebase -- --skip",
        )
    _commit(repository, fix_id, {path: (TREE / path).read_bytes() for path in changed})


def _unready(path: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith(_MARKERS):
            yield f"line {number} has a marker"
            return
    try:
        ast.parse(text)
    except SyntaxError as error:
        yield f"line {error.lineno} is no Python: {error.msg}"


def _commit(repository: Repository, fix_id: str, files: dict[str, bytes]) -> None:
    registry = load_registry()
    message = registry.message(registry.fix(fix_id))
    commit = repository.commit("HEAD", files, message, author=registry.author, date=DATE)
    repository.run("reset", "--quiet", "--hard", commit)


def commits_by_fix(repository: Repository) -> dict[str, str]:
    """Return the commits of the worktree, oldest first, by the fix that their trailer names.

    A person may have amended or reordered them.
    """
    layout = "--format=%H %(trailers:key=Fix,valueonly,separator=%x20)"
    rows = repository.run("log", "--reverse", layout, "HEAD").splitlines()
    pairs = (row.split(" ", 1) for row in rows)
    return {fix.strip(): commit for commit, fix in pairs if fix.strip()}


def _go_on(state: State) -> None:
    registry, series = load_registry(), load_series(state.line)
    repository = Repository(TREE)
    if state.phase is Phase.CARRYING:
        _carry_all(state, series, registry, repository)
        out.print(table(state.release, state.results))
        state.phase = Phase.PROVING
        state.save()
    if state.phase is Phase.PROVING:
        landing.prove(state, series, repository, commits_by_fix(repository))
        state.phase = Phase.LANDING
        state.save()
    landing.land(state)
    shutil.rmtree(WORK)


def _carry_all(state: State, series: Series, registry: Registry, repository: Repository) -> None:
    source = Source(lambda path: repository.read(f"v{state.source}", path) or "")
    carried, releases = commits_by_fix(repository), upstream(state.origin)
    done = {result.fix for result in state.results}
    for patch in series.patches:
        if patch.fix_id in done:
            source.add(patch, carried=patch.fix_id in carried)
            continue
        fix = registry.fix(patch.fix_id)
        stock = state.stock.get(fix.id, Stock.NOT_RUN)  # none for a fix that is new since then
        result = without_carrying(fix, state.release, stock)
        if result is None:
            one = carry(
                patch,
                source.before(patch),
                _in_worktree,
                repository,
                f"v{state.release}",
            )
            hints = (*_mentions(releases, fix, state.source, state.release), *_remarks(one))
            result = Result(fix.id, one.status, stock, hints)
            if stock is Stock.MIXED:
                hints = (f"by its text: {one.status.value}", *hints)
                result = Result(fix.id, Status.PARTLY, Stock.MIXED, hints)
            if result.status.stops:
                _stop(state, result, one)
            texts = {path: text.encode() for path, text in one.texts.items()}
            _commit(repository, fix.id, texts)
            source.add(patch, carried=True)
        else:
            source.add(patch, carried=False)
        state.results.append(result)
        state.save()
        err.print(f"{fix.id}: {result.status.value}", markup=False)
    # Lint would name a fix that is open and has no patch; the table should, before it.
    state.results += [
        Result(fix_id, Status.UNCARRIED, stock)
        for fix_id, stock in state.stock.items()
        if fix_id not in series.fix_ids and stock in (Stock.FAILS, Stock.MIXED)
    ]


def _in_worktree(path: str) -> str | None:
    return (TREE / path).read_bytes().decode() if (TREE / path).is_file() else None


def without_carrying(fix: Fix, release: str, stock: Stock) -> Result | None:
    """Return the result for a fix that `release` does not need, or is not to have; else None.

    Only tests that pass on the stock release show that; the registry's word counts as long as
    they do not contradict it, and the regression tests ask once more before anything lands.
    """
    if stock is Stock.PASSES:
        status = Status.UPSTREAM if fix.affects(release) else Status.NOT_AFFECTED
        return Result(fix.id, status, stock)
    if reason := fix.unpatched_on(release):
        return Result(fix.id, Status.SKIPPED, stock, (reason,))
    if not fix.affects(release) and stock in (Stock.UNKNOWN, Stock.NOT_RUN):
        hint = f"fixes.toml: applies to {fix.applies_to}"
        return Result(fix.id, Status.NOT_AFFECTED, stock, (hint,))
    return None


def _mentions(releases: Upstream, fix: Fix, one: str, other: str) -> list[str]:
    return releases.mentions(fix.upstream_pr, *sorted((one, other), key=Version))


def _remarks(one: Carried) -> Iterator[str]:
    """Yield what a person should know of hunks that were not carried as they are."""
    for hunk in one.hunks:
        if hunk.how not in (How.EXACT, How.MOVED) and "\n" not in hunk.said:
            yield f"{hunk.path}, hunk {hunk.number}: {hunk.said}"


def _stop(state: State, result: Result, one: Carried) -> None:
    """Leave the fix in the worktree for a person.

    Raises:
        NeedsPersonError: Always.
    """
    for path, text in one.texts.items():
        (TREE / path).write_bytes(text.encode())
    state.stopped = result
    state.save()
    out.print(collisions(result, one, state.release))
    where = TREE.relative_to(ROOT)
    raise NeedsPersonError(
        f"fix {result.fix} on vLLM {state.release}: {result.status.value}",
        expected=f"the fix as {state.release} needs it, in {where}/vllm "
        f"(as it is on {state.source}: git -C {where} show fix/{result.fix})",
        next_step="edit it there, then: nox -s rebase -- --continue; to leave the fix out: "
        "nox -s rebase -- --skip; to give up: nox -s rebase -- --abort",
    )


@dataclass(frozen=True)
class Trial:
    """What would become of each patch, and the new texts, by path, of all that were carried."""

    results: list[Result]
    texts: dict[str, str]


def try_all(
    releases: Upstream,
    series: Series,
    source: str,
    release: str,
    registry: Registry,
    said: Mapping[str, Stock],
) -> Trial:
    """Return what would become of each patch of `series` on `release`; nothing is written.

    A fix that needs a person counts as left out for those after it.

    Args:
        releases: Where both releases are.
        series: The line that is carried.
        source: The release that its patches are exported from.
        release: The release that they are carried to.
        registry: What is known of the fixes.
        said: What tests have said of the stock release, by fix.
    """
    repository = releases.repository
    stock, target = releases.tag(source), releases.tag(release)
    texts: dict[str, str] = {}
    before = Source(lambda path: repository.read(stock, path) or "")
    results = []

    @cache
    def stock_of_target(path: str) -> str | None:
        return repository.read(target, path)

    def ours(path: str) -> str | None:
        return texts[path] if path in texts else stock_of_target(path)

    for patch in series.patches:
        fix = registry.fix(patch.fix_id)
        result = without_carrying(fix, release, said[fix.id])
        if result is None:
            one = carry(patch, before.before(patch), ours, repository, target)
            hints = (*_mentions(releases, fix, source, release), *_remarks(one))
            status = Status.PARTLY if said[fix.id] is Stock.MIXED else one.status
            result = Result(fix.id, status, said[fix.id], hints)
            if not status.stops:
                texts |= one.texts
        before.add(patch, carried=result.status in _IN_TREE)
        results.append(result)
    return Trial(results, texts)


_IN_TREE = (Status.CARRIED, Status.OFFSETS, Status.MERGED, Status.RESOLVED)


def table(release: str, results: Sequence[Result]) -> Table:
    """Return what became of each fix, for people."""
    made = Table("fix", "result", "proof", _folded("hints"), title=f"vLLM {release}")
    for result in results:
        hints = escape("\n".join(result.hints))
        made.add_row(result.fix, result.status.value, result.proof.value, hints)
    return made


def collisions(result: Result, one: Carried, release: str) -> Table:
    """Return which hunks need a person, what they meet, and where their target may have gone."""
    made = Table(
        *map(_folded, ("file", "in", "hunk", "result", f"vLLM {release} has")),
        title=f"fix {result.fix}",
        show_lines=True,
    )
    for hunk in one.hunks:
        if hunk.how in (How.EXACT, How.MOVED):
            continue
        said = escape("\n".join([hunk.said, *(f"perhaps {place}" for place in hunk.went)]))
        made.add_row(hunk.path, hunk.definition, str(hunk.number), hunk.how.value, said)
    return made


def _folded(name: str) -> Column:
    return Column(name, overflow="fold")  # a path that is cut cannot be opened


if __name__ == "__main__":
    entry(main)

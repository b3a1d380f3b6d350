"""The steps of a rebase: started, stopped for a person, gone on with, until it lands."""

from __future__ import annotations

import ast
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from scripts.carry import landing
from scripts.carry.merge import Carried, Status
from scripts.carry.sides import Sides
from scripts.carry.state import STATE, WORK, Phase, Result, State, forget, load_state
from scripts.carry.tables import collisions, table
from scripts.carry.trial import judged, neighbours, start_of, without_carrying
from scripts.commits.patches import DATE, commit_hooks
from scripts.commits.worktree import changed_files
from scripts.patchset.registry import Registry, load_registry
from scripts.patchset.series import Series, load_series
from scripts.project import ROOT
from scripts.prove.stock import Stock, ask_stock
from scripts.system.console import err, out
from scripts.system.errors import NeedsPersonError, UsageError
from scripts.system.git import Repository
from scripts.upstream.history import Upstream, upstream

TREE = WORK / "tree"
_MARKERS = ("<<<<<<< vLLM ", "||||||| where ", ">>>>>>> ")


def start(release: str, source: str | None, origin: str | None) -> None:
    """Begin to carry the fixes of `source`, or of the nearest releases, to `release`.

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
    sources = [load_series(one) for one in neighbours(release, source)]
    registry, releases = load_registry(), upstream(origin)
    _make_tree(releases, sources, registry, release)
    said = ask_stock(release, list(registry.fixes.values()))
    begin = start_of(releases, sources, release, registry, said)
    err.print(begin.why, markup=False)
    state = State(release, [one.release for one in begin.series], begin.why, origin, said)
    state.save()
    _go_on(state)


def _make_tree(
    releases: Upstream, sources: Sequence[Series], registry: Registry, release: str
) -> None:
    """Check `release` out; beside it, as tags `<source>/<id>`, lie the fixes of each source."""
    repository = Repository.init(TREE)
    tags = {one: releases.tag(one) for one in (*(series.release for series in sources), release)}
    specs = [f"refs/tags/{tag}:refs/tags/{tag}" for tag in tags.values()]
    bare = str(releases.repository.path)
    repository.run("fetch", "--quiet", "--no-tags", "--depth=1", bare, *specs)
    for series in sources:
        commits = commit_hooks(repository, tags[series.release], series.patches, registry)
        for patch, commit in zip(series.patches, commits, strict=True):
            repository.run("tag", f"{series.release}/{patch.fix_id}", commit)
    repository.run("checkout", "--quiet", "--detach", tags[release])


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
        state.results.append(replace(stopped, status=status, hints=hints))
        state.stopped = None
        state.save()
    elif state.phase is Phase.CARRYING:  # killed: what was not recorded is carried anew
        known = {result.fix for result in state.results}
        unknown = [fix for fix in commits_by_fix(repository) if fix not in known]
        repository.run("reset", "--quiet", "--hard", "HEAD^" if unknown else "HEAD")
    elif changes := repository.changes():
        raise UsageError(
            f"{TREE.relative_to(ROOT)} has changes that are in no commit: {changes[0].strip()}",
            expected="each in the commit of its fix, as that is what is proven",
            next_step="amend that commit there, then: nox -s rebase -- --continue",
        )
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

    A person may have amended or reordered them, and have written anything into a message.
    """
    layout = "--format=%H%x00%(trailers:key=Fix,valueonly,unfold,separator=%x20)%x00"
    fields = repository.run("log", "--reverse", layout, "HEAD").split("\0")
    pairs = zip(fields[::2], fields[1::2], strict=False)  # what is left is the end of a line
    return {fix.strip(): commit.strip() for commit, fix in pairs if fix.strip()}


def _go_on(state: State) -> None:
    repository = Repository(TREE)
    if state.phase is Phase.CARRYING:
        _carry_all(state, load_registry(), repository)
        out.print(state.why, markup=False)
        out.print(table(state.release, state.results))
        state.phase = Phase.PROVING
        state.save()
    if state.phase is Phase.PROVING:
        landing.prove_in_copy(state, repository, commits_by_fix(repository))
        state.phase = Phase.LANDING
        state.save()
    landing.land(state)
    forget()


def _carry_all(state: State, registry: Registry, repository: Repository) -> None:
    sources = [load_series(one) for one in state.sources]
    sides = Sides(sources, lambda one, path: repository.read(f"v{one}", path) or "")
    carried, releases = commits_by_fix(repository), upstream(state.origin)
    done = {result.fix for result in state.results}
    fixes = sides.fixes(registry)
    for fix in fixes:
        if fix.id in done:
            sides.add(fix, carried=fix.id in carried)
            continue
        stock = state.stock.get(fix.id, Stock.NOT_RUN)  # none for a fix that is new since then
        result = without_carrying(fix, state.release, stock)
        if result is None:
            source, one = sides.carry(fix, _in_worktree, repository, f"v{state.release}")
            result = judged(releases, fix, state.release, source, one, stock)
            if result.status.stops:
                _stop(state, result, one)
            texts = {path: text.encode() for path, text in one.texts.items()}
            _commit(repository, fix.id, texts)
            sides.add(fix, carried=True)
        else:
            sides.add(fix, carried=False)
        state.results.append(result)
        state.save()
        err.print(f"{fix.id}: {result.status.value}", markup=False)
    # Lint would name a fix that is open and has no patch; the table should, before it.
    ids = {fix.id for fix in fixes}
    state.results += [
        Result(fix_id, Status.UNCARRIED, stock)
        for fix_id, stock in state.stock.items()
        if fix_id not in ids and stock in (Stock.FAILS, Stock.MIXED)
    ]


def _in_worktree(path: str) -> str | None:
    return (TREE / path).read_bytes().decode() if (TREE / path).is_file() else None


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
        f"(as it is on {result.source}: git -C {where} show {result.source}/{result.fix})",
        next_step="edit it there, then: nox -s rebase -- --continue; to leave the fix out: "
        "nox -s rebase -- --skip; to give up: nox -s rebase -- --abort",
    )

"""One session of upstream's own tests: what is run, on which sides, and what came of it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Sequence
from dataclasses import replace

from scripts.patchset.registry import load_registry
from scripts.patchset.series import Series
from scripts.patchset.target import Target
from scripts.project import project
from scripts.prove.environment import Environment
from scripts.prove.outcomes import Outcomes
from scripts.system.console import err
from scripts.system.errors import INTERRUPTED, UsageError
from scripts.upstream.tree import release_tree
from scripts.upstream_tests import later as forward_tests
from scripts.upstream_tests.compare import (
    Change,
    compare,
    faults,
    is_named,
    named,
    settle,
    unproven,
)
from scripts.upstream_tests.later import ForwardTest, owner
from scripts.upstream_tests.report import Report
from scripts.upstream_tests.run import run_jobs
from scripts.upstream_tests.selection import LEFT_OUT, affected, batches, recommended
from scripts.upstream_tests.side import Job, Side
from scripts.wheel.build import patched_wheel

_RECOMMENDED = "the recommended tests"
_REPEATS = 3  # of a test that differs, alone
_MANY = 30


def report_on(options: argparse.Namespace, release: str) -> Report:
    """Lay out both sides, run what was asked for, and say what came of it."""
    registry = load_registry()
    environment = Environment(release).make()
    wheels = {"stock": environment.stock}
    patched: Series | None = None
    if release in project().releases:
        wheels["patched"] = patched_wheel(release)
        patched = Target.of(release).series
    files, selection = _selection(options, release, patched)
    if not files:
        raise UsageError(
            f"vLLM {release} has no tests for that: {selection}",
            expected="at least one test file",
            next_step=f"nox -s upstream_tests -- {release} tests/v1/kv_connector/unit",
        )
    err.print(f"{release}: laying out wheels and tests for {' and '.join(wheels)} ...")
    sides = [Side(name, wheel, environment).prepare() for name, wheel in wheels.items()]
    later: dict[str, ForwardTest] = {}
    if selection == _RECOMMENDED:
        for side in sides:
            later = forward_tests.write(release, registry, side.folder / "tests")
    names = named(registry.fixes.values(), release, patched.fix_ids if patched else ())
    try:
        outcomes, changes = _run(options, sides, files, later, names)
    except KeyboardInterrupt:
        err.print("[bold]Interrupted.[/] What was done is kept: the same command and --resume")
        sys.exit(INTERRUPTED)
    whole = selection == _RECOMMENDED and not options.expression
    found = list(unproven(files, outcomes["stock"])) if whole else []
    if patched:
        found += faults(changes, names, whole=whole)
        found += forward_tests.outcome_faults(later, outcomes, whole=whole)
    return Report(
        release=release,
        selection=selection + (f", -k {options.expression!r}" if options.expression else ""),
        whole=whole,
        left_out=LEFT_OUT if whole else {},
        sides=tuple(sides),
        outcomes=outcomes,
        changes=changes,
        names=names,
        forward=forward_tests.results_by_test(later, outcomes),
        faults=tuple(found),
    )


def _selection(
    options: argparse.Namespace, release: str, series: Series | None
) -> tuple[list[str], str]:
    """Return the test files to run, and what to call them."""
    tree = release_tree(release)
    if options.affected is not None:
        if series is None or options.path:
            raise UsageError(
                f"the fixes were not carried to {release}"
                if series is None
                else "paths with --affected",
                expected="--affected alone, on a release with patches: it asks what they change",
                next_step=f"nox -s upstream_tests -- {project().default_release} --affected",
            )
        err.print(f"{release}: reading what its tests import ...")
        changed = {path for patch in series.patches for path in patch.files}
        steps = f"{options.affected} import{'s' if options.affected != 1 else ''}"
        return affected(tree, changed, options.affected), f"tests within {steps} of a patched file"
    if not options.path:
        return recommended(tree), _RECOMMENDED
    files: list[str] = []
    for name in options.path:
        path = tree / name
        tests = [path] if path.is_file() else sorted(path.rglob("test_*.py"))
        if not tests or not path.resolve().is_relative_to((tree / "tests").resolve()):
            raise UsageError(
                f"vLLM {release} has no tests at {name}",
                expected="a file or folder of its source tree",
                next_step=f"nox -s upstream_tests -- {release} tests/v1/kv_connector/unit",
            )
        files += [test.relative_to(tree).as_posix() for test in tests]
    return list(dict.fromkeys(files)), " ".join(options.path)


def _run(
    options: argparse.Namespace,
    sides: Sequence[Side],
    files: Sequence[str],
    later: dict[str, ForwardTest],
    names: Collection[str],
) -> tuple[dict[str, Outcomes], dict[str, Change]]:
    """Run everything on all sides, and what differs again.

    Returns:
        The outcomes by side, and what became of each of the release's own tests.
    """
    if not options.resume:
        for side in sides:
            side.forget()
    files = list(files)
    if options.expression:
        files, later = _matching(options.expression, sides[0], files, later)
    expression = options.expression or _without_left_out(options)
    jobs = [Job(batch, expression) for batch in batches(sides[0].folder, files)]
    if later:
        jobs.append(Job(tuple(later), options.expression))
    results = run_jobs(sides, jobs, resume=options.resume)
    outcomes = {
        side: {test: one for found in by_job.values() for test, one in found.items()}
        for side, by_job in results.items()
    }
    if len(sides) == 1:
        return outcomes, {}
    own = {
        side: {test: one for test, one in of_side.items() if owner(test, later) is None}
        for side, of_side in outcomes.items()
    }
    changes = compare(own["stock"], own["patched"])
    _settle(changes, sides, jobs, names, resume=options.resume)
    return outcomes, changes


def _without_left_out(options: argparse.Namespace) -> str:
    """Return the expression for the recommended files; others were asked for as they are."""
    whole = not options.path and options.affected is None
    return f"not ({' or '.join(LEFT_OUT)})" if whole else ""


def _matching(
    expression: str, side: Side, files: list[str], later: dict[str, ForwardTest]
) -> tuple[list[str], dict[str, ForwardTest]]:
    """Return the files, and the tests of later releases, that `expression` selects."""
    err.print(f"collecting -k {expression!r} ...", markup=False)
    chosen = side.collect(Job((*files, *later), expression))
    if not chosen:
        raise UsageError(
            f"no test is called {expression}",
            expected="what pytest's -k takes, in the selected files",
            next_step="leave -k out, or add the path of a file",
        )
    wanted = Job(tuple(chosen)).files
    ids = {*chosen, *(test.partition("[")[0] for test in chosen)}
    return (
        [file for file in files if file in wanted],
        {test: one for test, one in later.items() if test in ids},
    )


def _settle(
    changes: dict[str, Change],
    sides: Sequence[Side],
    jobs: Sequence[Job],
    names: Collection[str],
    *,
    resume: bool,
) -> None:
    """Run again, alone and in its job, what differs and is not named; correct `changes`."""
    unsettled = (Change.NEWLY_FAILING, Change.NEWLY_PASSING)
    differing = [
        test
        for test, change in changes.items()
        if change in unsettled and not is_named(test, names)
    ]
    if not differing:
        return
    if len(differing) > _MANY:
        err.print(f"{len(differing)} tests differ: too many to be flaky, none is run again")
        return
    err.print(f"{len(differing)} tests differ: running each again ...")
    alone = {test: [Job((test,), run=n + 1) for n in range(_REPEATS)] for test in differing}
    company = {
        test: replace(next(job for job in jobs if test.partition("::")[0] in job.files), run=1)
        for test in differing
    }
    again_jobs = dict.fromkeys([*(job for of in alone.values() for job in of), *company.values()])
    again = run_jobs(sides, list(again_jobs), resume=resume)
    for test in differing:
        stock, patched = (
            [again[side.name][job] for job in (*alone[test], company[test])] for side in sides
        )
        changes[test] = settle(changes[test], stock, patched, test)

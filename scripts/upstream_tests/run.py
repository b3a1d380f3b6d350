"""Jobs of both sides, as many at a time as there are cores, with counts while they run."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from functools import partial

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from scripts.prove.outcomes import Outcome, Outcomes
from scripts.system.console import err
from scripts.upstream_tests.side import Job, Side

_AT_A_TIME = max(1, min(4, os.cpu_count() or 1))  # a process takes 1.5 GB

Results = dict[str, dict[Job, Outcomes]]


def run_jobs(sides: Sequence[Side], jobs: Sequence[Job], *, resume: bool = False) -> Results:
    """Run every job on every side and return the outcomes by side and job.

    Each job that has ended is kept by its side at once. Ctrl-C kills the processes that run, and
    `resume` takes over what is kept.
    """
    results: Results = {side.name: {} for side in sides}
    todo = []
    for job in jobs:
        for side in sides:  # both sides run at about the same time, under the same load
            saved = side.saved(job) if resume else None
            if saved is None:
                todo.append((side, job))
            else:
                results[side.name][job] = saved
    if len(todo) < len(jobs) * len(sides):
        err.print(f"{len(jobs) * len(sides) - len(todo)} jobs were done before")
    stop = threading.Event()
    pool = ThreadPoolExecutor(_AT_A_TIME)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    bar = Progress(
        *columns, TimeElapsedColumn(), console=err, transient=True, disable=not err.is_terminal
    )
    task = bar.add_task("0 tests", total=len(todo))
    ended: Counter[str] = Counter()

    def on_test(side: str, count: int) -> None:
        ended[side] += count
        counts = ", ".join(f"{name} {number}" for name, number in sorted(ended.items()))
        bar.update(task, description=f"tests: {counts}")

    try:
        futures: dict[Future[Outcomes], tuple[Side, Job]] = {
            pool.submit(side.run, job, stop, partial(on_test, side.name)): (side, job)
            for side, job in todo
        }
        with bar:
            for number, future in enumerate(as_completed(futures), 1):
                side, job = futures[future]
                results[side.name][job] = found = future.result()
                bar.update(task, completed=number)
                what = f"[{number}/{len(todo)}] {side.name}: {_title(job)}: {count(found.values())}"
                err.print(what, markup=False)
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)
    return results


def count(outcomes: Iterable[Outcome]) -> str:
    """Return `3 failed, 20 passed` of some outcomes."""
    counts = Counter(outcome.result for outcome in outcomes)
    return ", ".join(f"{counts[result]} {result}" for result in sorted(counts)) or "no test"


def _title(job: Job) -> str:
    name = job.tests[0].rpartition("/")[2]
    more = f" and {len(job.tests) - 1} more" if len(job.tests) > 1 else ""
    return f"{name}{more}" + (f", run {job.run}" if job.run else "")

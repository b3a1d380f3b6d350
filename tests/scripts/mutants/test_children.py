"""Tasks in forks: what each is said to have done."""

from __future__ import annotations

import time
from collections.abc import Iterator

from tests.programs.mutants.children import Children, Say


def test_who_has_answered_late_is_not_silent_as_well() -> None:
    """The parent was busy, so that it reads the answer after the time for it is over."""

    def work(task: str, say: Say) -> str:
        return task.upper()

    def tasks() -> Iterator[str]:
        yield "late"
        children.first_limit = 60.0
        time.sleep(1.0)
        yield "other"

    children = Children(work, workers=2, first_limit=0.0)
    assert sorted(children.run(tasks())) == [("late", "LATE"), ("other", "OTHER")]

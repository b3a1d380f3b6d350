# SPDX-License-Identifier: Apache-2.0
"""All releases: a scheduler's statistics say which fixes have acted in its engine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_overlay.distributed.kv_transfer import fix_counts

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler


def tells_of_fixes(make: Callable[..., Any]) -> Callable[..., Any]:
    """Have `Scheduler.make_stats` say what was counted since it last made any."""

    @functools.wraps(make)
    def wrapper(self: Scheduler, *args: Any, **named: Any) -> Any:  # noqa: ANN401 - as upstream's
        stats = make(self, *args, **named)
        if stats is not None and (counts := fix_counts.taken()):
            stats.kv_transfer_fixes = counts
        return stats

    return wrapper

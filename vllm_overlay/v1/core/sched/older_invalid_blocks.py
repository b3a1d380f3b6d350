# SPDX-License-Identifier: Apache-2.0
"""Up to 0.18.1: `for_any_groups` for the schedulers of these releases.

Theirs finds out by itself which of a request's tokens were computed before the step. Since
0.19.0 it has to be told how many were scheduled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import wraps
from typing import TYPE_CHECKING

from vllm_overlay.v1.core.sched import invalid_blocks

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request


def for_any_groups(update: invalid_blocks.Update) -> invalid_blocks.Update:
    """Make `Scheduler._update_requests_with_invalid_blocks` right for every KV-cache layout."""

    def update_told(
        self: Scheduler,
        requests: Iterable[Request],
        invalid_block_ids: set[int],
        num_scheduled_tokens: Mapping[str, int],
        evict_blocks: bool = True,
    ) -> invalid_blocks.Affected:
        return update(self, requests, invalid_block_ids, evict_blocks)

    update_any = invalid_blocks.for_any_groups(update_told)

    @wraps(update)
    def update_untold(
        self: Scheduler,
        requests: Iterable[Request],
        invalid_block_ids: set[int],
        evict_blocks: bool = True,
    ) -> invalid_blocks.Affected:
        return update_any(self, requests, invalid_block_ids, {}, evict_blocks)

    return update_untold

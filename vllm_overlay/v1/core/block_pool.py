# SPDX-License-Identifier: Apache-2.0
"""All releases: KV is loaded into no block that a step which runs already may use.

With async scheduling, and with pipeline stages, the scheduler decides on steps while earlier ones
run. A request that leaves meanwhile (by an abort, a preemption or a stop), and a window that moves
on, free blocks that these steps read and write. That is no harm to the steps that come after them:
the device runs one after the other. But what a KV connector loads arrives when it arrives. A step
that runs then overwrites it, or reads it in place of its own.

So the pool knows, for each step that runs, what was freed since, and a load is given the first free
blocks that are not among these. If there are too few, it waits, at most until these steps have
ended. All else is as on stock: blocks are free when they are freed, for every other use and for
every count. (Upstream, from 0.24.0 on, holds them back from everybody. A request that is preempted
then frees nothing at once for the one that is short of blocks, so the next is preempted, and in the
end that one itself; and the prefix cache cannot be reset while a step runs.)

Up to 0.23.0 that is so for all blocks (45357), on 0.24.0 to 0.25.1 for those that a window or a
state leaves, which upstream holds back from 0.26.0 on (47728).
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock


class SparesRunningSteps:
    """A base for `BlockPool`. Until it is told of a step it does nothing."""

    free_block_queue: FreeKVCacheBlockQueue

    @functools.cached_property
    def _freed(self) -> deque[set[int]]:
        """For each step that runs, oldest first: the blocks freed after it and before the next."""
        return deque()

    def step_begins(self, most: int) -> None:
        """A step was decided on; with it, at most so many run."""
        while len(self._freed) >= most:
            self._freed.popleft()
        self._freed.append(set())

    def step_ends(self) -> None:
        """The output of the oldest step is there."""
        if self._freed:
            self._freed.popleft()

    def notes_freed(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Remember what is freed, if a step runs that may use it."""
        if self._freed:
            self._freed[-1].update(block.block_id for block in blocks)

    def has_for(self, loaded_tokens: int, count: int) -> bool:
        """Whether the first `count` free blocks suit a request that loads so many of its tokens.

        For a load, those that do are brought to the front; else the order of the blocks stays.
        """
        if not loaded_tokens:  # nearly always
            return True
        used = set[int]().union(*self._freed)
        if not used:
            return True
        queue = getattr(self, "free_block_queue", None)
        first: KVCacheBlock | None = getattr(queue, "fake_free_list_head", None)
        if first is None:  # a plugin's queue, or a plugin's pool that has none
            return True
        passed = []
        block = first.next_free_block
        end = self.free_block_queue.fake_free_list_tail
        while count and block is not None and block is not end:
            if block.block_id in used:
                passed.append(block)
            else:
                count -= 1
            block = block.next_free_block
        if count or block is None:
            return False
        for one in passed:
            self.free_block_queue.remove(one)
            _insert(self.free_block_queue, one, block)
        return True


def sparing(pool: object) -> SparesRunningSteps:
    """Return a block pool; in place of a plugin's, of a class of its own, one that does nothing."""
    return pool if isinstance(pool, SparesRunningSteps) else SparesRunningSteps()


def null_id(pool: object) -> int | None:
    """Return the id of the block that stands for none; None where a plugin's pool has no such."""
    block_id: int | None = getattr(getattr(pool, "null_block", None), "block_id", None)
    return block_id


def _insert(queue: FreeKVCacheBlockQueue, block: KVCacheBlock, after: KVCacheBlock) -> None:
    """Put a block before the one that comes `after` it: the queue itself adds to its ends only."""
    before = after.prev_free_block
    block.prev_free_block, block.next_free_block = before, after
    after.prev_free_block = block
    if before is not None:  # the queue has a block of its own before the first
        before.next_free_block = block
    queue.num_free_blocks += 1

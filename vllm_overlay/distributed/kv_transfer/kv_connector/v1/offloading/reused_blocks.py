# SPDX-License-Identifier: Apache-2.0
"""0.21.0 to 0.32.0: a block that is given away waits for its copy, whoever writes into it next.

The offloading connector copies blocks to the host in the background, also when their request has
ended, and has its workers wait for the copy of a block that another request gets. It knows such
blocks from what it loads itself and from what a step computes. Into those that another connector
loads, as NIXL does under `MultiConnector`, was written before they were copied, or meanwhile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request


def notes_what_others_load(update: Callable[..., None]) -> Callable[..., None]:
    """Have `update_state_after_alloc` of the connector's scheduler note blocks that it loads
    nothing into; those that it does it notes by itself."""

    @functools.wraps(update)
    def wrapper(
        self: Any,  # noqa: ANN401 - `OffloadingConnectorScheduler`, of any release
        request: Request,
        blocks: KVCacheBlocks,
        num_external_tokens: int,
    ) -> None:
        if num_external_tokens == 0:
            _note(self, blocks)
        update(self, request, blocks, num_external_tokens)

    return wrapper


def _note(scheduler: Any, blocks: KVCacheBlocks) -> None:  # noqa: ANN401
    """Note blocks that hold no prefix yet: one that is shared is written by nobody."""
    each = (block for group in blocks.blocks for block in group)
    given = {block.block_id for block in each if block.block_hash is None and not block.is_null}
    allocated = vars(scheduler).get("_current_batch_allocated_block_ids")  # from 0.23.0 on
    if allocated is not None:
        allocated |= given
        return
    copies = scheduler._block_id_to_pending_jobs
    for block in given & copies.keys():
        scheduler._current_batch_jobs_to_flush |= copies[block]


def blocks_for(connector: KVConnectorBase_V1, blocks: KVCacheBlocks) -> KVCacheBlocks:
    """Return what a connector that loads nothing is told of a request's blocks: none, as on stock
    up to 0.25.1, but for the offloading connector. By its name, for this is imported where nobody
    may want it."""
    if type(connector).__name__ == "OffloadingConnector":
        return blocks
    return blocks.new_empty()

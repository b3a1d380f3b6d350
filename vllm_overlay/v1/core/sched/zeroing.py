# SPDX-License-Identifier: Apache-2.0
"""Up to 0.25.1: a block that KV is loaded into is not zeroed while that arrives.

Where a model keeps states, the worker zeroes each block that an attention layer gets: what a state
left there may read as NaN, which attention does not mask. It does so on the device, after the steps
that run; a load is not ordered with these, so zeroes overwrite what arrived before.

A block that is loaded as a whole needs no zeroes. Should the load fail, a request of such a model
starts again with nothing (K02), and its new blocks are zeroed. The last block may have room behind
its tokens. NIXL reads all of it, with P's zeroes there, if P's blocks are no smaller than ours: on
as many tensor ranks, if ours are as small as a state allows. Else it is zeroed, as on stock.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.present import transfers_with_nixl
from vllm_overlay.v1.kv_cache_interface import state_specs

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

_STEP = 16
"""Tokens by which block sizes differ; a hybrid's is the first multiple that holds a state."""


def spares_loaded(scheduler: Scheduler, request: Request, loaded_tokens: int) -> None:
    """Leave what a request was given for its last `loaded_tokens` out of what this step zeroes."""
    if not scheduler.needs_kv_cache_zeroing:
        return
    end = request.num_computed_tokens  # counted in advance
    start = end - loaded_tokens
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    for group, manager in enumerate(managers):
        if not manager.new_block_ids:
            continue  # it holds states
        size = manager.block_size
        count = end // size
        if end % size and _reads_whole_blocks(scheduler, request, group, count + 1):
            count += 1
        blocks = manager.req_to_blocks[request.request_id][start // size : count]
        loaded = {block.block_id for block in blocks}
        manager.new_block_ids = [one for one in manager.new_block_ids if one not in loaded]


def _reads_whole_blocks(scheduler: Scheduler, request: Request, group: int, count: int) -> bool:
    """Whether NIXL reads the request from a P whose blocks, `count` of them, are not smaller."""
    params = request.kv_transfer_params
    if not transfers_with_nixl(scheduler.connector) or not isinstance(params, dict):
        return False
    ranks = scheduler.vllm_config.parallel_config.tensor_parallel_size
    remote = params.get("remote_block_ids") or ()
    return (
        params.get("tp_size") == ranks
        and group < len(remote)
        and len(remote[group]) == count
        and _is_smallest(scheduler, group)
    )


def _is_smallest(scheduler: Scheduler, group: int) -> bool:
    """Whether no smaller block holds a state: P's have to, and its states are like ours."""
    config = scheduler.kv_cache_config
    states = state_specs(config).values()
    state = max(replace(spec, page_size_padded=None).page_size_bytes for spec in states)
    ours = config.kv_cache_groups[group].kv_cache_spec
    return (ours.block_size - _STEP) * (ours.page_size_bytes // ours.block_size) < state

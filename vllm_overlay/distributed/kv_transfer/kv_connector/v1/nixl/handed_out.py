# SPDX-License-Identifier: Apache-2.0
"""Up to 0.24.0: a finished request's blocks are handed out as far as they were computed.

A scheduler that speculates reserves slots for tokens to come, so a request can hold a block more
than its tokens fill. Who reads the blocks counts from the last one back, and then takes each
block's KV for that of the block before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_interface import MambaSpec

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.utils import BlockIds
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.scheduler import (
        NixlConnectorScheduler,
    )
    from vllm.v1.request import Request


def computed_blocks(
    scheduler: NixlConnectorScheduler, request: Request, block_ids: BlockIds
) -> BlockIds:
    """Return of a finished request's blocks, a list for each group, those with computed tokens.

    With context parallelism each rank has a share of a block's tokens. States do not go by tokens,
    unless each block has one (mamba_cache_mode "all"); then slots for guesses follow. Of a request
    that says nothing of what was computed all are named, as on stock. The scheduler's own have
    blocks only as long as they have computed tokens, and are handed out when they sampled.
    """
    if not request.num_computed_tokens:
        return block_ids
    parallel = scheduler.vllm_config.parallel_config
    ranks = parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size
    specs = [group.kv_cache_spec for group in scheduler.kv_cache_config.kv_cache_groups]
    return tuple(
        _states(spec, ids, request)
        if isinstance(spec, MambaSpec)
        else ids[: cdiv(request.num_computed_tokens, spec.block_size * ranks)]
        for ids, spec in zip(block_ids, specs, strict=False)
    )


def _states(spec: MambaSpec, ids: list[int], request: Request) -> list[int]:
    if spec.mamba_cache_mode != "all":
        return ids
    return ids[: cdiv(request.num_computed_tokens, spec.block_size) + spec.num_speculative_blocks]


def computed_blocks_for_eagle(
    scheduler: NixlConnectorScheduler, request: Request, block_ids: BlockIds
) -> BlockIds:
    """From 0.23.0 on: the same, where D reads no more than those.

    Such a D which guesses with a draft model reserves slots while it loads, and so asks
    for the block that a P like itself reserves: they are paired rightly, and nothing may be cut.
    """
    speculative = scheduler.vllm_config.speculative_config
    if speculative is not None and not speculative.use_eagle():
        return block_ids
    return computed_blocks(scheduler, request, block_ids)

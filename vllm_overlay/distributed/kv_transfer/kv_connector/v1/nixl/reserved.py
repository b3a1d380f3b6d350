# SPDX-License-Identifier: Apache-2.0
"""0.23.0 to 0.24.0: what D reserves behind the tokens that it loads is not read into.

A scheduler that speculates with a draft model reserves slots for its guesses when it begins to
load a prompt, and gives NIXL their block with those of the prompt. NIXL pairs our blocks with P's
from the last one back. That is right where P names a block of the same slots, as a P does that
speculates likewise. Any other P has fewer blocks; then ours that it has nothing for are left out.

The slots stay reserved: else a request that was loaded might find no block when it is to start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_interface import CrossAttentionSpec, MambaSpec

from vllm_overlay.v1.kv_cache_interface import keeps_all

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.utils import BlockIds
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.scheduler import (
        NixlConnectorScheduler,
    )
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request


def without_reserved(
    scheduler: NixlConnectorScheduler,
    request: Request,
    blocks: KVCacheBlocks,
    loaded_tokens: int,
    block_ids: BlockIds,
) -> BlockIds:
    """Return those of `block_ids` that P's blocks are to be read into.

    `blocks` are all that the request holds, `block_ids` those of each group that the prefix cache
    did not have. Left out are blocks behind those of the last of `loaded_tokens`, as many as P
    names too few of. How many is told by a group that keeps every token, and holds for the
    groups with blocks of its size. Where there is none, or P names enough, all stay, as on stock;
    and always those of states, and of an encoder's tokens.
    """
    theirs = (request.kv_transfer_params or {}).get("remote_block_ids") or ()
    specs = [group.kv_cache_spec for group in scheduler.kv_cache_config.kv_cache_groups]
    if not len(block_ids) == len(specs) == len(theirs):
        return block_ids
    parallel = scheduler.vllm_config.parallel_config
    ranks = parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size
    for spec, held, new, named in zip(specs, blocks.blocks, block_ids, theirs, strict=True):
        if keeps_all(spec):
            cached = len(held) - len(new)
            filled = cached + cdiv(loaded_tokens, spec.block_size * ranks)
            surplus = max(0, len(held) - max(filled, len(named)))
            size = spec.block_size
            break
    else:
        return block_ids
    return [
        ids
        if spec.block_size != size or isinstance(spec, MambaSpec | CrossAttentionSpec)
        else ids[: len(ids) - surplus]
        for spec, ids in zip(specs, block_ids, strict=True)
    ]

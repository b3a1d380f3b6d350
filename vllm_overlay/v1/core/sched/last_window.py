# SPDX-License-Identifier: Apache-2.0
"""All releases: a prompt that is received whole comes with all that its last token looks at.

What is loaded counts as computed, so layers that look back over a window get no block for what the
token *after* the prompt does not see; and P gives such blocks up before it names those to read.
But D computes the last token of the prompt once more, for its logits, and it sees one token more.
Where that one is the last of its block, on stock the layers read the null block in its place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.utils.math_utils import cdiv

from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.older import (
    pulls,
    transfer_group_ids,
)
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.present import (
    connectors_in,
    loader_of,
    transfers_with_nixl,
)
from vllm_overlay.v1.kv_cache_interface import state_specs

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

_NULL_BLOCK = 0
"""Id of the block that stands for none: `BlockPool` takes its first one for that."""


def allocate_slots(
    scheduler: Scheduler,
    request: Request,
    num_new_tokens: int,
    *,
    num_new_computed_tokens: int,
    num_external_computed_tokens: int,
    delay_cache_blocks: bool,
    **more: Any,  # noqa: ANN401 - as the release has it
) -> KVCacheBlocks | None:
    """Give a request that waits its slots, as `KVCacheManager.allocate_slots` does.

    Where it would lose a token so, a load of the whole prompt takes the slots of a load of all but
    the last token, and of that token. These are the same but for the block of that one. Not where
    P has given that block up, as stock does: what it names in its place is not the prompt's.
    """
    end = num_new_computed_tokens + num_external_computed_tokens
    if (
        delay_cache_blocks
        and end == request.num_tokens
        and num_external_computed_tokens > 1
        and _pulls(loader_of(scheduler, request))  # first: a plugin's manager may have no groups
        and not _has_states(scheduler)
        and _loses_a_token(scheduler, end)
        and _is_named(scheduler, request, num_new_computed_tokens, end)
    ):
        num_external_computed_tokens -= 1
        num_new_tokens += 1
    return scheduler.kv_cache_manager.allocate_slots(
        request,
        num_new_tokens,
        num_new_computed_tokens=num_new_computed_tokens,
        num_external_computed_tokens=num_external_computed_tokens,
        delay_cache_blocks=delay_cache_blocks,
        **more,
    )


def remove_skipped_blocks(scheduler: Scheduler, request_id: str, **counts: int) -> None:
    """Give up what a finished request does not look at, as `KVCacheManager` does.

    If KV is transferred for it, that is what the last token of its prompt does not look at: of a
    request whose client has left, that may still be read into. A state is the one after all that
    was computed, and up to 0.19.1 the release counts the sampled token too. Of `counts` the first
    is that of the tokens computed; releases call it by different names.
    """
    request = scheduler.requests.get(request_id)
    if request is not None and _is_transferred(scheduler, request):
        name = next(iter(counts))
        states, prompt = _has_states(scheduler), request.num_prompt_tokens
        counts[name] = min(counts[name], request.num_computed_tokens if states else prompt - 1)
    scheduler.kv_cache_manager.remove_skipped_blocks(request_id=request_id, **counts)


def _is_transferred(scheduler: Scheduler, request: Request) -> bool:
    return bool(request.kv_transfer_params) and any(map(_pulls, connectors_in(scheduler.connector)))


def _loses_a_token(scheduler: Scheduler, end: int) -> bool:
    """Whether the last of `end` tokens looks into a block that the next one does not look into.

    Not where the last token begins a block: that would no longer count as one that is loaded.
    """
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    return any(
        one.get_num_skipped_tokens(end) // one.block_size
        > one.get_num_skipped_tokens(end - 1) // one.block_size
        for one in managers
    ) and all((end - 1) % one.block_size for one in managers)


def _is_named(scheduler: Scheduler, request: Request, hit: int, end: int) -> bool:
    """Whether P names each block that the last of `end` tokens looks at and the cache has not.

    Read into a block of ours, the null one would be in our prefix cache, for others to hit.

    Args:
        scheduler: of D.
        request: to be read.
        hit: leading tokens that are there already.
        end: tokens of the prompt.
    """
    params = request.kv_transfer_params or {}
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    named = [
        (managers[index], ids)
        for index, ids in zip(
            transfer_group_ids(scheduler.kv_cache_config),
            params.get("remote_block_ids") or (),
            strict=False,
        )
    ]
    # A P that has generated more than a token names blocks that come after the prompt, too.
    beyond = max([0, *(len(ids) - cdiv(end, one.block_size) for one, ids in named)])
    for one, ids in named:
        skipped = one.get_num_skipped_tokens(end - 1)
        last = cdiv(end, one.block_size) - max(skipped, hit) // one.block_size + beyond
        if skipped and (len(ids) < last or _NULL_BLOCK in ids[len(ids) - last :]):
            return False
    return True


def _has_states(scheduler: Scheduler) -> bool:
    """Whether there are states, of which P computes and NIXL reads all but the last token."""
    return bool(state_specs(scheduler.kv_cache_config))


def _pulls(connector: Any) -> bool:  # noqa: ANN401 - of any kind
    """Whether a connector is NIXL's, and D reads from P."""
    part = getattr(connector, "connector_scheduler", None)
    return part is not None and transfers_with_nixl(connector) and pulls(part)

# SPDX-License-Identifier: Apache-2.0
"""0.24.0 to 0.26.0: what the prefix cache has of a hybrid's prompt counts if all layers have it.

With a KV connector, a model with recurrent states has each group of layers looked up in the prefix
cache by itself: a connector that loads the rest of a prompt loads the state at its end, and need
not load what attention has. Stock counts the longest of these hits as computed, and keeps to it
where nothing is loaded. Where attention's is the longest, the model then goes on without a state;
where it is the state's, attention looks at blocks that nobody has written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.present import (
    connectors_in,
    transfers_with_nixl,
)

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request


def reads_prefix_cache(request: Request) -> bool:
    """Say whether a request may use what is cached: not if it asks for logprobs of its prompt."""
    return not request.skip_reading_prefix_cache


def hits_before_load(
    scheduler: Scheduler, request: Request
) -> tuple[tuple[list[KVCacheBlock], ...], tuple[int, ...]]:
    """Look up what a connector that loads need not load.

    Returns:
        The blocks of each group, and how many tokens they count for, of which the highest number
        holds: what full attention has. A group that has more counts as one that has nothing, with
        NIXL: that reads whatever a group has no block for, and so reads as much as on stock. Other
        connectors bring what follows the tokens that count; there it is what all groups have.
    """
    coordinator: Any = scheduler.kv_cache_manager.coordinator
    blocks, hits = coordinator.find_longest_cache_hit_per_group(
        request.block_hashes, request.num_tokens - 1
    )
    found = hits
    with_nixl = [*map(transfers_with_nixl, connectors_in(scheduler.connector))] == [True]
    if with_nixl:
        blocks, hits = _whole_blocks(scheduler, blocks, hits)
    differ = request if len({*found, *hits}) > 1 else None
    scheduler._hits_differ = differ  # type: ignore[attr-defined, unused-ignore]
    groups = scheduler.kv_cache_config.kv_cache_groups
    attention = [
        hit
        for hit, group in zip(hits, groups, strict=True)
        if isinstance(group.kv_cache_spec, FullAttentionSpec)
    ]
    if max(hits) == min(attention, default=0):
        return blocks, hits
    if with_nixl:
        local = max(attention, default=0)
        kept = zip(blocks, hits, strict=True)
        return tuple(one if hit <= local else [] for one, hit in kept), (local,)
    blocks, agreed, _ = _agreed_hits(scheduler, request)
    return blocks, (agreed,)


def hits_after_load(
    scheduler: Scheduler,
    request: Request,
    loaded: int,
    *found: Any,  # noqa: ANN401 - see Args
) -> tuple[KVCacheBlocks, int, int]:
    """Look again at what was found for a request, now that it is known what is loaded.

    Args:
        scheduler: of the engine.
        request: to be scheduled.
        loaded: tokens that the connector brings.
        found: the blocks; the tokens that they count for; and, up to 0.25.1, how many more tokens
            some group has, or, from 0.26.0 on, where these end (0 if none has). Where these end, a
            state is to be kept for the next request with the same beginning.

    Returns:
        `found`; or, where nothing is loaded and the groups have not found the same, what they all
        have, blocks that they have the beginning of included. Then the lookup has been counted for
        as many tokens.
    """
    blocks, local, further = found
    if loaded or vars(scheduler).get("_hits_differ") is not request:
        return blocks, local, further
    manager = scheduler.kv_cache_manager
    agreed_blocks, agreed, further = _agreed_hits(scheduler, request)
    if manager.log_stats:
        stats: Any = manager.prefix_cache_stats
        if request.num_preemptions > 0:
            stats.preempted_hits += agreed - local
        else:
            stats.hits += agreed - local
    return manager.create_kv_cache_blocks(agreed_blocks), agreed, further


def _whole_blocks(
    scheduler: Scheduler, blocks: tuple[list[KVCacheBlock], ...], hits: tuple[int, ...]
) -> tuple[tuple[list[KVCacheBlock], ...], tuple[int, ...]]:
    """Leave out what a group has of a block's beginning: NIXL reads whole blocks."""
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    whole = tuple(hit - hit % scheduler.block_size for hit in hits)
    return tuple(
        one[: hit // manager.block_size]
        for one, hit, manager in zip(blocks, whole, managers, strict=True)
    ), whole


def _agreed_hits(
    scheduler: Scheduler, request: Request
) -> tuple[tuple[list[KVCacheBlock], ...], int, int]:
    """What all groups have, and the third of what `hits_after_load` calls `found`."""
    coordinator: Any = scheduler.kv_cache_manager.coordinator
    blocks, agreed, *further = coordinator.find_longest_cache_hit(
        request.block_hashes, request.num_tokens - 1
    )
    if further:
        return blocks, agreed, agreed + further[0] if further[0] else 0
    more: int = getattr(coordinator, "num_uncached_common_prefix_tokens", 0)  # not of a plugin's
    coordinator.num_uncached_common_prefix_tokens = 0  # the next request's lookup may not say it
    return blocks, agreed, more

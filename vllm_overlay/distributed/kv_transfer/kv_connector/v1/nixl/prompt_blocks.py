# SPDX-License-Identifier: Apache-2.0
"""All releases: of the blocks that P names, those of the prompt are read, not what came after it.

P names the blocks of all tokens that it computed, and a router may have let it generate. D has
blocks for its prompt, and both lists are paired from their ends further on: so what lies beyond the
end of ours is left out of P's list first. A group that keeps all tokens is named from the first one
on. With the blocks that the prefix cache already had, which are never asked for, ours say where
that list has to end. Of a group that keeps a window P names the last blocks, and has freed
earlier ones: if the prompt's are not among them, nothing can be read.

States are no matter of this: of such a model P's own scheduler never generates more than a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.utils.math_utils import cdiv

from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.older import (
    transfer_group_ids,
    transfer_groups,
)
from vllm_overlay.v1.kv_cache_interface import keeps_all

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.utils import BlockIds
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import ReqMeta
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks

_NULL_BLOCK = 0
"""Id of the block that stands for none: `BlockPool` takes its first one for that."""


class _Uncached(list[int]):
    """Blocks of one group that are to be read; `hits` blocks before them are there already.

    It stays in the scheduler: a worker in another process gets a list.
    """

    hits: int

    def __reduce__(self) -> tuple[type[list[int]], tuple[list[int]]]:
        return list, (list(self),)


def with_hits(block_ids: BlockIds, blocks: KVCacheBlocks) -> BlockIds:
    """Up to 0.28.0: have the blocks that are to be read say how many the prefix cache had."""
    found = []
    for ids, group in zip(block_ids, blocks.blocks, strict=False):
        uncached = _Uncached(ids)
        uncached.hits = sum(b.block_hash is not None and not b.is_null for b in group)
        found.append(uncached)
    return type(block_ids)(found)


def tell_hits(meta: ReqMeta) -> None:
    """Up to 0.28.0: tell a worker, wherever it is, how many blocks the prefix cache had.

    From 0.29.0 on the metadata has a field of this name. A worker that is not patched does not look
    at it, and gets what it knows. Where blocks of states were left out, nothing is told: of such a
    model nothing is cut.
    """
    said = tuple(ids.hits for ids in meta.local_block_ids if isinstance(ids, _Uncached))
    if len(said) == len(meta.local_block_ids):
        meta.local_num_computed_blocks = said  # type: ignore[attr-defined, unused-ignore]


def read_prompt_only(worker: Any, meta: ReqMeta) -> None:  # noqa: ANN401 - of any release
    """From 0.21.0 on: leave out what P names beyond our blocks, before its list is expanded.

    Raises:
        ValueError: see `_of_window`.
    """
    _cut(worker, meta, _tokens_of_a_block)


def read_prompt_only_of_one_ratio(worker: Any, meta: ReqMeta) -> None:  # noqa: ANN401 - see above
    """For 0.20.x, where P's ratio of kernel blocks, unless there are states, has to be ours."""
    _cut(worker, meta, _tokens_of_a_block_of_our_ratio)


def read_prompt_only_of_kernel_blocks(worker: Any, meta: ReqMeta) -> None:  # noqa: ANN401
    """Up to 0.19.1, where P's list was expanded before the handshake."""
    _cut(worker, meta, _tokens_of_a_kernel_block)


def _tokens_of_a_block(worker: Any, engine_id: str) -> int | None:  # noqa: ANN401 - see above
    """How many tokens each block that P names holds; None if its lists do not end as ours do."""
    peer = worker.transfer_topo.get_engine_info(engine_id)
    if max(getattr(worker, "dcp_size", 1), getattr(peer, "remote_dcp_size", 1)) > 1:
        return None  # paired from the first token on
    theirs = vars(worker).get("dst_region_group_ids", {}).get(engine_id)
    if theirs is not None and worker.region_group_ids and worker.region_group_ids != theirs:
        return None  # groups that are not ours, so nothing here tells where they end
    tokens: int = peer.remote_block_size * peer.remote_physical_blocks_per_logical
    return tokens


def _tokens_of_a_block_of_our_ratio(worker: Any, engine_id: str) -> int:  # noqa: ANN401
    peer = worker.transfer_topo.get_engine_info(engine_id)
    tokens: int = peer.remote_block_size * worker._physical_blocks_per_logical_kv_block
    return tokens


def _tokens_of_a_kernel_block(worker: Any, engine_id: str) -> int:  # noqa: ANN401
    tokens: int = worker.kv_topo.remote_block_size[engine_id]
    return tokens


def _cut(
    worker: Any,  # noqa: ANN401 - of any release
    meta: ReqMeta,
    tokens_of: Callable[[Any, str], int | None],
) -> None:
    """Leave out what P names beyond our blocks.

    Raises:
        ValueError: see `_of_window`.
    """
    assert meta.remote is not None  # noqa: S101 - for mypy: a receive has a remote
    hits = _hits(worker, meta)
    if hits is None or worker._has_mamba:
        return
    tokens = tokens_of(worker, meta.remote.engine_id)
    if tokens is None:
        return
    ours_hold = worker.block_size * worker._physical_blocks_per_logical_kv_block
    groups = transfer_groups(worker.kv_cache_config)
    specs = [group.kv_cache_spec for group in groups]
    ours, theirs = meta.local_block_ids, meta.remote.block_ids
    ends = {
        group: cdiv((hits[group] + len(ours[group])) * ours_hold, tokens)
        for group, spec in enumerate(specs)
        if keeps_all(spec)
    }
    if all(len(theirs[group]) <= end for group, end in ends.items()):  # nearly always
        return
    # Groups of one block size have as many blocks for the same tokens.
    beyond = {specs[group].block_size: len(theirs[group]) - end for group, end in ends.items()}
    meta.remote.block_ids = [
        ids[: ends[group]]
        if group in ends
        else _of_window(
            ids, beyond.get(spec.block_size), cdiv(len(ours[group]) * ours_hold, tokens)
        )
        for group, (spec, ids) in enumerate(zip(specs, theirs, strict=True))
    ]


def _of_window(theirs: list[int], beyond: int | None, needed: int) -> list[int]:
    """Return of a window's last blocks those up to the end of the prompt.

    Args:
        theirs: what P names.
        beyond: how many of them come after the prompt; None if that is not known.
        needed: how many of the prompt's are to be read.

    Raises:
        ValueError: that is not known, or P does not have all of those any more.
    """
    if not needed:
        return []
    kept = theirs[: len(theirs) - max(beyond, 0)] if beyond is not None else []
    if len(kept) < needed or _NULL_BLOCK in kept[-needed:]:
        raise ValueError(
            f"P has generated after the prompt, and of a sliding window it names {len(theirs)} "
            f"blocks, which do not hold the {needed} that the prompt ends with. Let P generate no "
            "more than one token (max_tokens)."
        )
    return kept


def _hits(worker: Any, meta: ReqMeta) -> list[int] | None:  # noqa: ANN401 - of any release
    """How many blocks of each group the prefix cache had; None if nobody says so.

    There is nothing to pair where no blocks are to be read.
    """
    if not any(meta.local_block_ids):
        return None
    counted: Sequence[int] = getattr(meta, "local_num_computed_blocks", ())
    return [counted[i] for i in transfer_group_ids(worker.kv_cache_config)] if counted else None

# SPDX-License-Identifier: Apache-2.0
"""From 0.24.0 on: which block of theirs goes into which of ours, of ids upstream expands.

The rule is that of `vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.blocks`: blocks are
paired rightly, or the peer is refused in the handshake. From 0.27.0 on kernel blocks may differ in
size in models of several groups. From 0.29.0 on the scheduler also says how many blocks of each
group the prefix cache already had, so that need not be inferred.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.blocks import (
    holds_all_tokens,
    peer_ratio,
    refuse_other_block_size,
    refuse_other_ratio,
    refuse_unpairable_hybrid,
)
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.older import (
    pulls,
    transfer_group_ids,
    transfer_groups,
)
from vllm_overlay.v1.kv_cache_interface import is_made_of

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.utils import BlockIds
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import (
        NixlBaseConnectorWorker,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
        NixlAgentMetadata,
        ReqMeta,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import (
        NixlPullConnectorWorker,
    )


def refuse_hybrid(worker: NixlBaseConnectorWorker, peer: NixlAgentMetadata) -> None:
    """Refuse a peer of a Mamba hybrid whose blocks could not be paired with ours in a pull.

    Raises:
        RuntimeError: see `refuse_unpairable_hybrid`.
    """
    if pulls(worker):
        refuse_unpairable_hybrid(worker, peer)  # type: ignore[arg-type, unused-ignore]


def refuse_other_size(worker: NixlBaseConnectorWorker, peer: NixlAgentMetadata) -> None:
    """Refuse a peer whose ``--block-size`` differs where a pull cannot serve that.

    Regions that belong to other groups on P than here are paired token by token, whatever the
    sizes. Elsewhere context ranks take turns block by block; and a group that keeps a window of the
    prompt ends, with another ``--block-size``, in a block that is padded differently on both sides,
    and nothing says how far the window goes back.

    Raises:
        RuntimeError: the ratios differ; or the sizes of blocks, with context ranks; or those of
            kernel blocks, on a CPU or with a window.
    """
    if not pulls(worker):
        return
    if _grouped_otherwise(worker, peer):
        return
    ratio = peer_ratio(worker, peer)  # type: ignore[arg-type, unused-ignore]
    theirs = ratio * peer.block_size
    ours = worker._physical_blocks_per_logical_kv_block * worker.block_size
    if theirs != ours and _context_ranks(worker, getattr(peer, "dcp_size", 1)) > 1:
        raise RuntimeError(
            f"NIXL handshake: engine {peer.engine_id} has blocks of {theirs} tokens, this engine "
            f"of {ours}, and context ranks hold them by turns. Start prefill and decode with the "
            "same --block-size."
        )
    refuse_other_block_size(worker, peer)  # type: ignore[arg-type, unused-ignore]
    specs = [group.kv_cache_spec for group in transfer_groups(worker.kv_cache_config)]
    paired = all(map(holds_all_tokens, specs)) or (theirs == ours and all(map(_is_plain, specs)))
    if peer.block_size != worker.block_size and not paired:
        raise RuntimeError(
            f"NIXL handshake: engine {peer.engine_id} has kernel blocks of {peer.block_size} "
            f"tokens, this engine of {worker.block_size}, and not every layer keeps the whole "
            "prompt. Start prefill and decode with the same --block-size."
        )


def _context_ranks(worker: Any, theirs: int) -> int:  # noqa: ANN401 - of any release
    """Of how many ranks at most, here or at a peer, each has a share of the tokens."""
    return max(getattr(worker, "dcp_size", 1), theirs)  # from 0.29.0 on it may be a peer's


def _shares_context(worker: Any, meta: ReqMeta | None) -> bool:  # noqa: ANN401 - see above
    """Whether a request is read from, or by, ranks each of which has a share of the tokens."""
    if meta is None or meta.remote is None:
        return False
    peer = worker.transfer_topo.get_engine_info(meta.remote.engine_id)
    return _context_ranks(worker, getattr(peer, "remote_dcp_size", 1)) > 1


def _as_on_stock(worker: Any, *of_both: object) -> tuple[BlockIds, BlockIds]:  # noqa: ANN401
    mapped: tuple[BlockIds, BlockIds] = worker._map_block_ids_for_block_size_ratio(*of_both)
    return mapped


def _is_plain(spec: KVCacheSpec) -> bool:
    """Whether a group keeps keys and values, of all tokens or of those in a window."""
    plain = is_made_of(spec, FullAttentionSpec | SlidingWindowSpec)
    return plain and not is_made_of(spec, SlidingWindowMLASpec)


def _has_other_ratio(worker: Any, meta: ReqMeta | None) -> bool:  # noqa: ANN401 - of any release
    """Whether a hybrid is read from a peer of another ratio."""
    if not worker._has_mamba or meta is None or meta.remote is None:
        return False
    peer = worker.transfer_topo.get_engine_info(meta.remote.engine_id)
    ours: int = worker._physical_blocks_per_logical_kv_block
    return bool(peer.remote_physical_blocks_per_logical != ours)


def _grouped_otherwise(worker: Any, peer: NixlAgentMetadata) -> bool:  # noqa: ANN401 - as it says
    """Whether regions belong to other groups on P than here; up to 0.29.0 they cannot."""
    if not hasattr(worker, "dst_region_group_ids"):
        return False
    theirs = worker.dst_region_group_ids[peer.engine_id]
    return bool(worker.region_group_ids and worker.region_group_ids != theirs)


def refuse_pusher(worker: NixlBaseConnectorWorker, peer: NixlAgentMetadata) -> None:
    """Refuse a peer that would push into blocks of ours other than it means.

    P pairs the blocks of a push, and knows neither our prefix hits nor the length of the prompt.
    It is here that a refusal fails the receive; whom P refuses waits for ever. Nothing is said
    about peers whose layers are grouped otherwise than ours.

    Raises:
        RuntimeError: see `refuse_unpairable_hybrid`; or the ratios differ, or the kernel blocks:
            larger ones of P end our engine once they have been written, smaller ones P refuses.
    """
    theirs = getattr(peer, "region_group_ids", None)  # from 0.30.0 on
    if theirs is not None and getattr(worker, "region_group_ids", theirs) != theirs:
        return
    refuse_unpairable_hybrid(worker, peer)  # type: ignore[arg-type, unused-ignore]
    if peer.block_size != worker.block_size:
        raise RuntimeError(
            f"NIXL handshake: engine {peer.engine_id} pushes kernel blocks of {peer.block_size} "
            f"tokens, this engine has {worker.block_size}. Start prefill and decode with the same "
            "--block-size."
        )
    refuse_other_ratio(worker, peer)  # type: ignore[arg-type, unused-ignore]


def pair_smaller_blocks(
    worker: NixlPullConnectorWorker,
    req_id: str,
    local_block_ids: BlockIds,
    remote_block_ids: BlockIds,
    block_size_ratio: int,
) -> tuple[BlockIds, BlockIds]:
    """Pair our kernel blocks with a peer's that hold fewer tokens.

    Each of ours is read in `block_size_ratio` parts, numbered as `get_mapped_blocks` does it. The
    peer holds the whole prompt; what the prefix cache had is left out at its start, and padding
    at our end. States are whole. What is paired replaces the peer's blocks in the request's
    metadata, from which the worker sees later what to clear. How many blocks were left out, the
    request says from 0.29.0 on, or K19 does. Else, and of a window, which both sides name up to the
    same block, the lengths tell it; but of a hybrid of two ratios no prefix is cached
    (`refuse_unpairable_hybrid`). Of context ranks upstream has left it out before.

    Returns:
        Parts of local blocks and remote blocks, equally many and of the same tokens in each
        group. No local group at all where nothing is to be read.

    Raises:
        ValueError: we ask for more blocks than the prompt has.
    """
    if not any(local_block_ids):
        return [], remote_block_ids
    meta = worker._recving_metadata.get(req_id)
    if _shares_context(worker, meta):
        return _as_on_stock(worker, local_block_ids, remote_block_ids, block_size_ratio)
    hits = getattr(meta, "local_num_computed_blocks", ())  # from 0.29.0 on
    specs = [group.kv_cache_spec for group in transfer_groups(worker.kv_cache_config)]
    ours, theirs = [list(ids) for ids in local_block_ids], [list(ids) for ids in remote_block_ids]
    for group, index in enumerate(transfer_group_ids(worker.kv_cache_config)):
        if not ours[group] or issubclass(worker._group_spec_types[group], MambaSpec):
            continue
        parts = worker.get_mapped_blocks(np.asarray(ours[group]), block_size_ratio).tolist()
        of_logical = worker._physical_blocks_per_logical_kv_block * block_size_ratio
        surplus = -(-len(theirs[group]) // of_logical) * of_logical - len(parts)
        if hits and not is_made_of(specs[group], SlidingWindowSpec):
            hit = hits[index] * of_logical
        elif surplus >= 0:
            hit = 0 if _has_other_ratio(worker, meta) else surplus
        else:
            raise ValueError(
                f"{len(ours[group])} local blocks of {block_size_ratio} parts were asked for, but "
                f"there are only {len(theirs[group])} remote blocks"
            )
        theirs[group] = theirs[group][hit : hit + len(parts)]
        ours[group] = parts[: len(theirs[group])]
    if meta is not None and meta.remote is not None:
        paired = zip(meta.remote.block_ids, theirs, ours, strict=True)
        meta.remote.block_ids = [new if read else old for old, new, read in paired]
    return ours, theirs

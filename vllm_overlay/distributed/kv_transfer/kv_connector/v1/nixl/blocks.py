# SPDX-License-Identifier: Apache-2.0
"""From 0.20.0 on: which block of the prefill side goes into which block of ours.

Schedulers count in *logical* blocks (``--block-size`` tokens), attention kernels and transfers
in *kernel* blocks. An engine's ratio is how many of its kernel blocks make one of its logical
blocks: logical block ``b`` is kernel blocks ``b * ratio`` to ``b * ratio + ratio - 1``. P and D
choose their ratios independently (a Mamba hybrid's depends on its TP size), so the ids that P
sends mean nothing without *P's* ratio. A wrong ratio is not an error anywhere: some other
request's KV arrives and is used. Hence the rule here: pair blocks rightly, or refuse the peer in
the handshake, before the first read.

Block ids are lists with one list of ids for each KV-cache group, in the order of the groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.ssm_conv_transfer_utils import (
    compute_physical_blocks_per_logical,
)
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MambaSpec

from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.parts import refuse_unsorted_parts
from vllm_overlay.v1.kv_cache_interface import is_made_of

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.utils import BlockIds
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlAgentMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.worker import NixlConnectorWorker

logger = init_logger(f"vllm.{__name__}")

NULL_BLOCK = 0
"""Id of the block that stands for none: `BlockPool` takes its first one for that."""

PACKED_BY_BLOCK = ("CPU_ATTN", "ROCM_ATTN")
"""Attention that orders keys by the size of a block: no order of small blocks is a large one."""

_Function = TypeVar("_Function", bound=Callable[..., object])


def method(function: _Function) -> _Function:
    """Return `function`; a class body that assigns the result has it as a method."""
    return function


# ---------------------------------------------------------------- the handshake


def peer_ratio(worker: NixlConnectorWorker, peer: NixlAgentMetadata) -> int:
    """Return how many kernel blocks make one logical block of `peer`.

    Since 0.21.0 the handshake says it (`physical_blocks_per_logical_kv_block`); our 0.20.x says
    it in the same field, stock 0.20.x does not, and nothing else on the wire tells: kernel block
    size, number of kernel blocks and bytes of a kernel block are the same for every ratio. Then
    the release's own assumption stands, as long as what we can see does not refute it: a
    Mamba hybrid has the smallest ratio whose logical block holds one state, any other model has
    our ratio.

    Raises:
        RuntimeError: the ratio cannot be right, or is unknown and our own engine shows that the
            assumption does not hold for this deployment.
    """
    own = worker._physical_blocks_per_logical_kv_block
    ratio: int | None = peer.physical_blocks_per_logical_kv_block
    if ratio is None:
        ratio = _assumed_ratio(worker, peer)
    if ratio < 1 or peer.num_blocks % ratio:
        raise RuntimeError(
            f"NIXL handshake: engine {peer.engine_id} has {peer.num_blocks} kernel blocks, "
            f"which are no whole number of logical blocks of {ratio} (ours have {own}). "
            "Start prefill and decode with the same --block-size."
        )
    return ratio


def _assumed_ratio(worker: NixlConnectorWorker, peer: NixlAgentMetadata) -> int:
    """The ratio of a peer that does not say it, by the rule that stock 0.20.x follows."""
    own = worker._physical_blocks_per_logical_kv_block
    if not worker._has_mamba:
        logger.warning_once(
            "NIXL handshake: engine %s does not say how many kernel blocks make one of its "
            "logical blocks; assuming %d, as on this engine. Make sure that it runs with the "
            "same --block-size, or upgrade it.",
            peer.engine_id,
            own,
        )
        return own
    smallest = compute_physical_blocks_per_logical(
        worker._mamba_ssm_size, worker.block_len_per_layer[0]
    )
    if own != smallest:
        # The rule gives the wrong answer for ourselves, so why should it be right for the peer?
        raise RuntimeError(
            f"NIXL handshake: engine {peer.engine_id} does not say how many kernel blocks make "
            f"one of its logical blocks. It cannot be inferred either: the inference gives "
            f"{smallest} for this engine, which has {own}. Upgrade the other engine, or start "
            "both without --block-size."
        )
    return compute_physical_blocks_per_logical(peer.ssm_sizes, peer.block_lens[0])


def refuse_unpairable_hybrid(worker: NixlConnectorWorker, peer: NixlAgentMetadata) -> None:
    """Refuse a peer of a Mamba hybrid whose blocks could not be paired with ours.

    With different ratios, blocks are paired from the start of the prompt (see
    `apply_prefix_caching`), so both sides must hold it from the start: no prefix hits here, no
    group that keeps only a window of the prompt.

    Raises:
        RuntimeError: the ratios differ and one of those is in use; or the ranks of the peer
            do not agree on theirs.
    """
    own, ratio = worker._physical_blocks_per_logical_kv_block, peer_ratio(worker, peer)
    assert worker.transfer_topo is not None  # noqa: S101 - for mypy: set before any handshake
    known = worker.transfer_topo.get_engine_info(peer.engine_id).remote_physical_blocks_per_logical
    if known != ratio:
        raise RuntimeError(
            f"NIXL handshake: engine {peer.engine_id} has ranks with {known} and with {ratio} "
            "kernel blocks in a logical block. Give all of them the same settings; if it was "
            "restarted just now, the next request tries again."
        )
    if ratio == own or not worker._has_mamba:
        return
    if worker.vllm_config.cache_config.enable_prefix_caching:
        raise RuntimeError(
            f"NIXL handshake: engine {peer.engine_id} has {ratio} kernel blocks in a logical "
            f"block, this engine {own}. A hybrid model with Mamba layers can then not be "
            "received while prefix caching is on: start this engine with "
            "--no-enable-prefix-caching."
        )
    specs = [group.kv_cache_spec for group in worker.kv_cache_config.kv_cache_groups]
    if windowed := [type(spec).__name__ for spec in specs if not holds_all_tokens(spec)]:
        raise RuntimeError(
            f"NIXL handshake: engine {peer.engine_id} has {ratio} kernel blocks in a logical "
            f"block, this engine {own}. This model cannot be received then, because not every "
            f"layer keeps the whole prompt ({', '.join(windowed)}): use the same "
            "--tensor-parallel-size and --block-size on both."
        )


def holds_all_tokens(spec: KVCacheSpec) -> bool:
    """Whether a group keeps every token's KV, or a state (which has no tokens to pair)."""
    return is_made_of(spec, FullAttentionSpec | MambaSpec)


def refuse_other_ratio(worker: NixlConnectorWorker, peer: NixlAgentMetadata) -> None:
    """Refuse a peer whose ``--block-size`` differs where that cannot be served.

    Without Mamba layers the ratio follows from it alone, and a prefix hit at our block size may
    end inside a block of the peer. Kernel blocks of two sizes are served if smaller ones are put
    together rightly (`refuse_unsorted_parts`), and never where keys are `PACKED_BY_BLOCK`.

    Raises:
        RuntimeError: the ratios differ, or the sizes of the kernel blocks where they must not.
    """
    own, ratio = worker._physical_blocks_per_logical_kv_block, peer_ratio(worker, peer)
    if not worker._has_mamba and ratio != own:
        raise RuntimeError(
            f"NIXL handshake: engine {peer.engine_id} has {ratio} kernel blocks in a logical "
            f"block ({ratio * peer.block_size} tokens), this engine {own} "
            f"({own * worker.block_size} tokens). Start prefill and decode with the same "
            "--block-size."
        )
    if (packs := _packs_by_block(worker)) and peer.block_size != worker.block_size:
        raise RuntimeError(
            f"NIXL handshake: engine {peer.engine_id} has kernel blocks of {peer.block_size} "
            f"tokens, this engine of {worker.block_size}. {packs} lays them out "
            "differently. Start prefill and decode with the same --block-size."
        )
    refuse_unsorted_parts(worker, peer)


def _packs_by_block(worker: NixlConnectorWorker) -> str:
    """The name of the attention here that does so; of a hybrid the first may be that of states."""
    names = (worker.backend_name, *(backend.get_name() for backend in worker.attn_backends))
    return next((name for name in names if name in PACKED_BY_BLOCK), "")


def refuse_other_block_size(worker: NixlConnectorWorker, peer: NixlAgentMetadata) -> None:
    """From 0.22.0 on: refuse what `refuse_other_ratio` does, but not smaller kernel blocks alone.

    There P's ids are expanded by its own ratio. Where ``--block-size`` is the same on both sides a
    prefix hit ends with a block of the peer, and `pair_smaller_blocks` is right.

    Raises:
        RuntimeError: see `refuse_other_ratio`.
    """
    own, ratio = worker._physical_blocks_per_logical_kv_block, peer_ratio(worker, peer)
    same = ratio * peer.block_size == own * worker.block_size
    if not same or ratio < own or _packs_by_block(worker):
        refuse_other_ratio(worker, peer)
    else:
        refuse_unsorted_parts(worker, peer)


# ---------------------------------------------------------------- the read


def logical_to_remote_kernel_block_ids(
    worker: NixlConnectorWorker, block_ids: BlockIds, remote_physical_per_logical: int
) -> BlockIds:
    """Return the peer's kernel blocks that make its logical blocks `block_ids`.

    A Mamba group's blocks are states, which no kernel divides: their ids stay.
    """
    if remote_physical_per_logical == 1:
        return block_ids
    within = np.arange(remote_physical_per_logical)
    groups = worker.kv_cache_config.kv_cache_groups
    return [
        ids
        if isinstance(groups[i].kv_cache_spec, MambaSpec)
        else np.add.outer(np.asarray(ids, dtype=np.int64) * remote_physical_per_logical, within)
        .ravel()
        .tolist()
        for i, ids in enumerate(block_ids)
    ]


def apply_prefix_caching(
    worker: NixlConnectorWorker,
    local_block_ids: BlockIds,
    remote_block_ids: BlockIds,
    remote_physical_per_logical: int,
) -> tuple[BlockIds, BlockIds]:
    """Cut kernel block ids so that the n-th local block takes the n-th remote block.

    With one ratio on both sides the lists end with the same block of the prompt, and a prefix
    hit makes ours shorter: the peer's lose the blocks that we hold already, at the front. With
    two ratios, which `refuse_unpairable_hybrid` allows only without prefix hits, both start with
    the prompt and one side has more padding after it: the longer list loses its end.

    Returns:
        Local and remote ids, equally many in each group.

    Raises:
        ValueError: the lists cannot belong to the same prompt.
    """
    # Most receives: one group, no prefix hit.
    if len(local_block_ids) == 1 and len(local_block_ids[0]) == len(remote_block_ids[0]):
        return local_block_ids, remote_block_ids
    pairs = list(zip(local_block_ids, remote_block_ids, strict=True))
    cut = [_cut(worker, i, pairs, remote_physical_per_logical) for i in range(len(pairs))]
    return [ours for ours, _ in cut], [theirs for _, theirs in cut]


def _cut(
    worker: NixlConnectorWorker,
    group: int,
    pairs: Sequence[tuple[list[int], list[int]]],
    ratio: int,
) -> tuple[list[int], list[int]]:
    """Cut the lists of one group; see `apply_prefix_caching`."""
    ours, theirs = pairs[group]
    if len(ours) == len(theirs):
        return ours, theirs
    own = worker._physical_blocks_per_logical_kv_block
    surplus = len(theirs) - len(ours)
    spec = worker.kv_cache_config.kv_cache_groups[group].kv_cache_spec
    if isinstance(spec, MambaSpec):
        # A state is whole or worthless, and stands last: where P caches prefixes, null blocks in
        # front of it stand for the rest of the prompt. Ours are left out before they come here.
        # A P that guesses may still have the state before it, in one more.
        front = set(theirs[: max(0, surplus)])
        before = set(theirs[: max(0, surplus - 1)])
        alike = len(theirs) - spec.num_speculative_blocks == _blocks_of_prompt(worker, pairs, ratio)
        if front == {NULL_BLOCK} or (before == {NULL_BLOCK} and alike):
            return ours, theirs[surplus:]
    elif not worker._has_mamba or ratio == own:
        if surplus > 0:
            return ours, theirs[surplus:]
    elif abs(surplus) < max(own, ratio):
        shorter = min(len(ours), len(theirs))
        return ours[:shorter], theirs[:shorter]
    raise ValueError(
        f"KV-cache group {group} has {len(ours)} local and {len(theirs)} remote blocks, which do "
        f"not hold the same prompt (kernel blocks in a logical block: local {own}, remote {ratio})"
    )


def _blocks_of_prompt(
    worker: NixlConnectorWorker, pairs: Sequence[tuple[list[int], list[int]]], ratio: int
) -> int | None:
    """How many logical blocks a prompt takes, if P's are like ours and we ask for equally many.

    So long is P's list of states, if it caches prefixes, before its slots for guesses. Of attention
    a P that guesses may name one block too many, and we may have some in our prefix cache.
    """
    own = worker._physical_blocks_per_logical_kv_block
    if ratio != own:
        return None
    counts = {
        len(ids) // own
        for group, pair in zip(worker.kv_cache_config.kv_cache_groups, pairs, strict=True)
        if is_made_of(group.kv_cache_spec, FullAttentionSpec)
        for ids in pair
    }
    return counts.pop() if len(counts) == 1 else None


def pair_smaller_blocks(
    worker: NixlConnectorWorker,
    req_id: str,
    local_block_ids: BlockIds,
    remote_block_ids: BlockIds,
    block_size_ratio: int,
) -> tuple[BlockIds, BlockIds]:
    """Pair our kernel blocks with a peer's that hold fewer tokens; one KV-cache group.

    Each of ours is read in `block_size_ratio` parts, numbered as `get_mapped_blocks` does it.
    The peer holds the whole prompt; what the prefix cache had is left out at its start, and at our
    end what is reserved for tokens to come. How many blocks the cache had, K19 says. Without it the
    length of the peer's list tells how many the prompt takes here, and so how many we do not ask
    for.

    Returns:
        Parts of local blocks and remote blocks, equally many and of the same tokens. No local
        group at all where nothing is to be read.

    Raises:
        ValueError: we ask for more than the prompt has, and our guesses may take.
    """
    if not any(local_block_ids):
        return [], remote_block_ids
    [ours], [theirs] = local_block_ids, remote_block_ids
    parts = worker.get_mapped_blocks(np.asarray(ours), block_size_ratio).tolist()
    of_logical = worker._physical_blocks_per_logical_kv_block * block_size_ratio
    meta = worker._recving_metadata.get(req_id)
    hits: Sequence[int] = getattr(meta, "local_num_computed_blocks", ())
    whole_prompt = -(-len(theirs) // of_logical) * of_logical
    hit = hits[0] * of_logical if hits else whole_prompt - len(parts)
    speculates = worker.vllm_config.speculative_config
    guesses = speculates.num_speculative_tokens if speculates is not None else 0
    tokens = worker.block_size * worker._physical_blocks_per_logical_kv_block
    end = whole_prompt - (-guesses // tokens) * of_logical
    if not 0 <= hit < len(theirs) or hit + len(parts) > end:
        raise ValueError(
            f"{len(ours)} local blocks of {block_size_ratio} parts were asked for, but "
            f"{len(theirs)} remote blocks fill only {whole_prompt} parts"
        )
    wanted = theirs[hit : hit + len(parts)]
    return [parts[: len(wanted)]], [wanted]

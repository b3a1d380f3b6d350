# SPDX-License-Identifier: Apache-2.0
"""Up to 0.28.0: a rank is read by those that hold the same tokens, and says which it holds.

With decode context parallelism each rank of a group keeps the KV of a share of the tokens: some in
a row (``--cp-kv-cache-interleave-size``), then it is the next one's turn. A block stands for other
tokens then, by the rank that holds it and by how many there are, and D reads it all the same: the
handshake says nothing of it. From 0.29.0 on it does, and D reads what it needs of several ranks.

The share goes in a field that is ours: who does not know it passes over it, and of a peer that does
not say it nothing is known, so it is read as on stock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed import parallel_state

from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.older import pulls

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlAgentMetadata

_Share = tuple[int, int, int]
"""Which of how many ranks holds it, from 0 on, and how many tokens in a row each has."""

_WHOLE: _Share = 0, 1, 1


@dataclass
class SaysShare:
    """A base for `NixlAgentMetadata`, which a rank says about itself.

    Attributes:
        context_share: what it holds of each prompt; None if it does not say.
    """

    context_share: tuple[int, int, int] | None = field(default=None, kw_only=True)


def own_share(worker: Any) -> _Share:  # noqa: ANN401 - of any release
    """Return what this rank holds of each prompt."""
    config = worker.vllm_config.parallel_config
    size: int = config.decode_context_parallel_size
    if size == 1:
        return _WHOLE
    rank: int = parallel_state.get_dcp_group().rank_in_group
    return rank, size, config.cp_kv_cache_interleave_size


def refuse_other_share(
    worker: Any,  # noqa: ANN401 - of any release
    peer: NixlAgentMetadata,
    remote_tp_rank: int,
    remote_tp_size: int,
) -> None:
    """Refuse a rank of a peer that a pull would read though it holds other tokens than this one.

    Of several ranks with the same latent cache the first is read, and the others hear of it. Heads
    that lie on several ranks are read of all; those keep whole prompts, as this one does, or
    upstream refuses them after this.

    Args:
        worker: that of this rank.
        peer: what the other rank says about itself.
        remote_tp_rank: which one that is.
        remote_tp_size: how many ranks the peer has.

    Raises:
        RuntimeError: the shares differ.
    """
    theirs = peer.context_share
    first = worker.tp_rank * remote_tp_size // worker.world_size
    if theirs is None or remote_tp_rank != first or not pulls(worker):
        return
    ours = own_share(worker)
    if theirs == ours:
        return
    raise RuntimeError(
        f"NIXL handshake: rank {remote_tp_rank} of engine {peer.engine_id} holds {_named(theirs)}, "
        f"and rank {worker.tp_rank} of this engine, which would read it, {_named(ours)}. Start "
        "prefill and decode with the same --tensor-parallel-size, --decode-context-parallel-size "
        "and --cp-kv-cache-interleave-size."
    )


def _named(share: _Share) -> str:
    rank, size, tokens = share
    return "all tokens" if share == _WHOLE else f"share {rank} of {size} (in a row: {tokens})"

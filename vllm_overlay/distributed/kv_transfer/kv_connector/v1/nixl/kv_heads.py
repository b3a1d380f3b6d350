# SPDX-License-Identifier: Apache-2.0
"""Up to 0.23.0: which KV heads a tensor rank holds, also where there are not more heads than ranks.

Ranks share the heads evenly. Where there are more ranks than heads each holds one, the same as its
neighbours, and the ratio of two engines' ranks is not that of their blocks any more. A latent cache
has no heads: each rank holds all of it, whatever number of heads the model's config has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.worker import NixlConnectorWorker


class Ranks(Protocol):
    """What a worker knows of tensor ranks: `TpKVTopology`, from 0.20.0 on `TransferTopology`."""

    tp_rank: int
    total_num_kv_heads: int

    @property
    def tp_size(self) -> int:
        """How many ranks the engine has."""


def peer_block_len(ranks: Ranks, remote_tp_size: int, block_len: int, block_size_ratio: int) -> int:
    """Return the bytes of a block of the peer, which has no more ranks, by those of this rank's.

    Args:
        ranks: this rank.
        remote_tp_size: tensor ranks of the peer.
        block_len: bytes of a block of this rank, in one layer's keys or values.
        block_size_ratio: blocks of the peer in one of this rank, by their tokens.
    """
    heads = _held(ranks, remote_tp_size) // _held(ranks, ranks.tp_size)
    return block_len * heads // block_size_ratio


def place_in_peer(ranks: Ranks, remote_tp_size: int) -> int:
    """Return where in a block of the rank that is read from this rank's heads begin.

    Counted in blocks of this rank. The peer has no more ranks than this engine.
    """
    size = ranks.tp_size
    ours = _first(ranks, ranks.tp_rank, size)
    theirs = _first(ranks, ranks.tp_rank * remote_tp_size // size, remote_tp_size)
    return (ours - theirs) // _held(ranks, size)


def ratio_of_parts(worker: NixlConnectorWorker, tp_ratio: int) -> int:
    """Return what the ratio of two engines' ranks is to a handshake: one where none holds a part.

    Beside recurrent states, which ranks share out, it stays what it is.

    Args:
        worker: that of this rank.
        tp_ratio: ranks of this engine for each of the peer, or those of the peer for each of this
            one, negative.
    """
    return 1 if worker.use_mla and not worker._has_mamba else tp_ratio


def _held(ranks: Ranks, tp_size: int) -> int:
    return max(1, ranks.total_num_kv_heads // tp_size)


def _first(ranks: Ranks, rank: int, tp_size: int) -> int:
    return rank * ranks.total_num_kv_heads // tp_size

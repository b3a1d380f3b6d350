"""45330: P and D need not have as many tensor ranks, nor fewer ranks than the model has KV heads.

The model has 8 KV heads. Of more ranks than that several hold the same head, so what a rank holds
says nothing about their number; and of 8 ranks each holds a head of its own, as of fewer ranks.
"""

from __future__ import annotations

import msgspec
import pytest
import torch

from tests.support.nixl_release import NixlAgentMetadata, NixlConnectorWorker
from tests.support.nixl_worker import (
    attempt,
    make_worker,
    nixl_of,
    rank_key,
    receive,
    target_ranks,
)
from tests.support.stand_in_model import HEADS

THEIRS, OURS = 5, 2
"""The block that is read, and the one that it is read into."""


def heads_of(worker: NixlConnectorWorker, block: int) -> list[torch.Tensor]:
    """A block's KV by head, of the first layer: of a rank with one head a list of one."""
    cache = worker.device_kv_caches["group0.layer0"]
    assert isinstance(cache, torch.Tensor)
    beside = cache.dim() == 4  # blocks, heads, tokens, keys and values
    return list((cache[block] if beside else cache[:, block]).unbind(0 if beside else 2))


def prefilled(tp_size: int, rank: int) -> NixlConnectorWorker:
    """A rank of P; each head of its block is filled with one more than the head's number."""
    worker = make_worker(engine_id="P", tp_size=tp_size, tp_rank=rank)
    first = rank * HEADS // tp_size
    for number, head in enumerate(heads_of(worker, THEIRS), start=first):
        head[:] = number + 1
    return worker


def received(worker: NixlConnectorWorker, tp_size: int) -> list[set[float]]:
    """Shake hands with the ranks of P that D's rank reads from, and read a block.

    Returns:
        for each head that the rank holds, what is in it afterwards.
    """
    peers = {rank: prefilled(tp_size, rank) for rank in target_ranks(worker, tp_size)}
    agents = {}
    for rank, peer in peers.items():
        payload = peer.xfer_handshake_metadata
        assert payload is not None
        said = msgspec.msgpack.decode(payload.agent_metadata_bytes, type=NixlAgentMetadata)
        agents[rank_key(rank)] = worker.add_remote_agent(said, rank, tp_size)
    worker._remote_agents["P"] = agents
    receive(worker, local_blocks=[[OURS]], remote_blocks=[[THEIRS]], tp_size=tp_size)
    for read in nixl_of(worker).reads:
        nixl_of(worker).move(read)
    return [set(head.flatten().tolist()) for head in heads_of(worker, OURS)]


@pytest.mark.parametrize("rank", [0, 1, -3, -1], ids=["first", "second", "third-last", "last"])
@pytest.mark.parametrize(("p_tp", "d_tp"), [(2, 16), (4, 16), (8, 16)])
def test_a_rank_of_d_gets_the_heads_that_it_computes_with(p_tp: int, d_tp: int, rank: int) -> None:
    worker = make_worker(tp_size=d_tp, tp_rank=rank % d_tp)
    head = rank % d_tp * HEADS // d_tp
    assert attempt(received, worker, p_tp) == [{head + 1.0}]


@pytest.mark.parametrize("d_tp", [4, 2])
def test_a_d_with_fewer_ranks_gets_the_heads_of_a_p_with_one_each(d_tp: int) -> None:
    worker = make_worker(tp_size=d_tp, tp_rank=1)
    held = HEADS // d_tp
    assert attempt(received, worker, HEADS) == [{h + 1.0} for h in range(held, 2 * held)]

"""K30: of an NVFP4 cache D's ranks receive their own heads, or refuse P.

A page has the data of all heads and then their scales, once for keys and once for values, so that
no piece of it is what some of the heads have.
"""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest
import torch
from vllm.config.cache import CacheDType
from vllm.v1.attention.backends.flashinfer import FlashInferMetadataBuilder

from tests.support.harness import HarnessError
from tests.support.nixl_release import NixlAgentMetadata, NixlConnectorWorker
from tests.support.nixl_worker import (
    lives,
    make_vllm_config,
    make_worker,
    nixl_of,
    rank_key,
    receive,
    step,
    target_ranks,
)
from tests.support.release import since
from tests.support.stand_in_model import HEADS

BLOCKS, TOKENS = [[1, 3]], 16


def page(rank: int, ranks: int) -> torch.Tensor:
    """What a block of a rank's cache holds, heads outermost: as FlashInfer's backend has it."""
    first, held = rank * HEADS // ranks, max(1, HEADS // ranks)
    chance = torch.Generator().manual_seed(0)
    sizes = 2, HEADS, TOKENS
    data = torch.randint(1, 256, (*sizes, 8), generator=chance, dtype=torch.uint8)
    scales = torch.randint(1, 256, (*sizes, 1), generator=chance, dtype=torch.uint8)
    own = slice(first, first + held)
    return torch.cat([part[side, own].flatten() for side in range(2) for part in (data, scales)])


def rank_of(engine_id: str, rank: int, ranks: int) -> NixlConnectorWorker:
    return make_worker(
        engine_id=engine_id,
        tp_rank=rank,
        tp_size=ranks,
        groups=("nvfp4",),
        block_size=TOKENS,
        whole=True,
    )


def pages(worker: NixlConnectorWorker, block: int) -> list[torch.Tensor]:
    """A block's bytes in each layer."""
    caches = worker.device_kv_caches.values()
    return [
        torch.as_strided(one, (one[0].numel(),), (1,), block * one[0].numel()) for one in caches
    ]


def faults(prefill: int, decode: int) -> list[str]:
    """Which blocks of which of D's ranks are not what they should be; none of a rank that refused P
    before any read."""
    found = []
    theirs = [rank_of("P", rank, prefill) for rank in range(prefill)]
    for rank, worker in enumerate(theirs):
        for block in BLOCKS[0]:
            for one in pages(worker, block):
                one[:] = page(rank, prefill)
    for rank in range(decode):
        d = rank_of("D", rank, decode)
        agents = {}
        try:
            for asked in target_ranks(d, prefill):
                payload = theirs[asked].xfer_handshake_metadata
                said = msgspec.msgpack.decode(payload.agent_metadata_bytes, type=NixlAgentMetadata)
                agents[rank_key(asked)] = d.add_remote_agent(said, asked, prefill)
        except HarnessError:
            raise
        except RuntimeError as refusal:
            assert "NVFP4" in str(refusal)
            assert nixl_of(d).reads == []
            continue
        d._remote_agents["P"] = agents
        receive(d, local_blocks=BLOCKS, remote_blocks=BLOCKS, tp_size=prefill)
        for read in nixl_of(d).in_flight():
            nixl_of(d).move(read)
            nixl_of(d).finish(read)
        lives(step, d)
        found += [
            f"rank {rank}, block {block}"
            for block in BLOCKS[0]
            for one in pages(d, block)
            if not torch.equal(one, page(rank, decode))
        ]
    return found


if since("0.21.0"):

    @pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (1, 8), (2, 4)])
    def test_more_ranks_of_d_share_the_heads(prefill: int, decode: int) -> None:
        assert faults(prefill, decode) == []

    @pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (8, 1), (4, 2)])
    def test_more_ranks_of_p_share_the_heads(prefill: int, decode: int) -> None:
        assert faults(prefill, decode) == []

else:

    def test_no_engine_has_such_a_cache() -> None:
        """The one backend that takes its name refuses, as it is set up."""
        named = "nvfp4" in get_args(CacheDType)
        assert named == since("0.20.0")
        if named:
            config = make_vllm_config(engine_id="P")
            config.cache_config.cache_dtype = "nvfp4"
            spec = rank_of("P", 0, 1).kv_cache_config.kv_cache_groups[0].kv_cache_spec
            with pytest.raises(NotImplementedError, match="nvfp4"):
                FlashInferMetadataBuilder(spec, [], config, torch.device("cpu"))

"""Which heads a tensor rank shares with its peer, and that a block of another size is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.nixl_worker import attempt, make_worker, peer_metadata

pytest.importorskip(
    "vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.kv_heads", reason="up to 0.23.0"
)
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.kv_heads import (
    peer_block_len,
    place_in_peer,
    ratio_of_parts,
)

SIZES = [1, 2, 4, 8, 16, 32]
"""Of tensor ranks; the numbers of heads as well, and 24, which some of them cannot share."""


def heads_of(heads: int, size: int, rank: int) -> list[int]:
    """The heads that a rank computes with, as vLLM's layers share them out."""
    if size >= heads:
        return [rank // (size // heads)]
    each = heads // size
    return list(range(rank * each, (rank + 1) * each))


def shared_out(heads: int, size: int) -> bool:
    return heads % size == 0 or size % heads == 0


def all_ranks(*, more_ours: bool) -> list[tuple[Any, int]]:
    """Every rank of every engine, and a peer's size; `more_ours` says which side has more ranks."""
    return [
        (SimpleNamespace(tp_rank=rank, tp_size=size, total_num_kv_heads=heads), other)
        for heads in [*SIZES, 24]
        for size in SIZES
        for other in SIZES
        if shared_out(heads, size) and shared_out(heads, other)
        if (size >= other if more_ours else size < other)
        for rank in range(size)
    ]


def test_the_place_of_our_heads_is_where_the_peer_has_them() -> None:
    for ranks, other in all_ranks(more_ours=True):
        heads, size = ranks.total_num_kv_heads, ranks.tp_size
        ours = heads_of(heads, size, ranks.tp_rank)
        theirs = heads_of(heads, other, ranks.tp_rank // (size // other))
        assert peer_block_len(ranks, other, 64 * len(ours), 1) == 64 * len(theirs)
        start = place_in_peer(ranks, other) * len(ours)
        assert theirs[start : start + len(ours)] == ours


def test_between_ranks_without_copies_it_is_the_ratio_of_the_ranks() -> None:
    for ranks, other in all_ranks(more_ours=True):
        if ranks.tp_size <= ranks.total_num_kv_heads:
            ratio = ranks.tp_size // other
            assert peer_block_len(ranks, other, 64, 2) == 64 * ratio // 2
            assert place_in_peer(ranks, other) == ranks.tp_rank % ratio


@pytest.mark.parametrize(
    ("ours", "theirs", "times"),
    [(16, 8, 2), (16, 4, 4), (16, 4, 1), (4, 8, 1), (4, 2, 1), (16, 16, 2), (4, 4, 2)],
)
def test_a_peer_whose_blocks_are_of_another_size_is_refused(
    ours: int, theirs: int, times: int
) -> None:
    worker = make_worker(tp_size=ours)
    said = peer_metadata(
        worker, "P", tp_size=theirs, block_lens=[n * times for n in worker.block_len_per_layer]
    )
    refusal = attempt(worker.add_remote_agent, said, 0, theirs)
    assert "AssertionError" in str(refusal), refusal
    assert "P" not in worker.dst_xfer_side_handles
    assert "P" not in worker._remote_agents


@pytest.mark.parametrize(("ours", "theirs"), [(8, 16), (16, 32), (4, 16)])
def test_a_peer_with_copies_and_more_ranks_is_refused_as_by_upstream(
    ours: int, theirs: int
) -> None:
    """Its ranks that nobody reads from would wait for a word until their leases end."""
    worker = make_worker(tp_size=ours)
    said = peer_metadata(
        worker,
        "P",
        tp_size=theirs,
        block_lens=[n * 8 // ours or n for n in worker.block_len_per_layer],
    )
    assert "AssertionError" in str(attempt(worker.add_remote_agent, said, 0, theirs))


@pytest.mark.parametrize(
    ("use_mla", "states", "ratio", "wanted"),
    [
        (True, False, -4, 1),
        (True, False, 2, 1),
        (True, True, -4, -4),
        (False, False, -4, -4),
        (False, True, 2, 2),
    ],
)
def test_only_of_a_latent_cache_alone_no_rank_holds_a_part(
    use_mla: bool, states: bool, ratio: int, wanted: int
) -> None:
    worker: Any = SimpleNamespace(use_mla=use_mla, _has_mamba=states)
    assert ratio_of_parts(worker, ratio) == wanted

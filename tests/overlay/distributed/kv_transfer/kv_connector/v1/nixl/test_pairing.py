"""Kernel blocks of two sizes, where upstream expands the ids: paired rightly, or refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.kv_landing import Deployment, Engines
from tests.support.nixl_worker import connect, make_worker, nixl_of, peer_metadata

pairing = pytest.importorskip(
    "vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.pairing", reason="from 0.24.0 on"
)


@pytest.mark.parametrize("mla", [False, True])
@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("split", [2, 3])
@pytest.mark.parametrize(("tokens", "hit"), [(1, 0), (23, 0), (31, 1), (49, 1)])
def test_each_token_lands_in_its_place(
    mla: bool, ratio: int, split: int, tokens: int, hit: int
) -> None:
    deployment = Deployment(ratio, ratio, kernel=4, split=split, prefix_caching=True, mla=mla)
    engines = Engines(deployment)
    engines.connect()
    assert engines.faults_of_a_prompt(tokens, hit) == []
    assert nixl_of(engines.decode).reads


class TestPairSmallerBlocks:
    def test_nothing_to_read(self) -> None:
        worker = make_worker()
        nothing: list[list[list[int]]] = [[], [[]]]
        for local in nothing:
            assert pairing.pair_smaller_blocks(worker, "r", local, [[1, 2]], 2) == ([], [[1, 2]])

    def test_more_than_the_prompt(self) -> None:
        with pytest.raises(ValueError, match="2 local blocks"):
            pairing.pair_smaller_blocks(make_worker(), "r", [[1, 2]], [[1, 2]], 2)

    def test_the_scheduler_s_word_on_the_prefix_goes_before_a_guess(self) -> None:
        """Padding at our end: the lengths alone would say that there was no hit."""
        worker = make_worker()
        remote = SimpleNamespace(block_ids=[[1, 2, 3]])
        meta: Any = SimpleNamespace(local_num_computed_blocks=(1,), remote=remote)
        worker._recving_metadata["r"] = meta
        ours, theirs = pairing.pair_smaller_blocks(worker, "r", [[4, 5]], [[1, 2, 3]], 2)
        assert theirs == [[3]]
        assert ours == [[8]]  # the first of the two parts of block 4
        assert remote.block_ids == [[3]]


class TestRefusals:
    def test_a_window_with_kernel_blocks_of_two_sizes(self) -> None:
        engines = Engines(Deployment(1, 1, groups=("full", "sliding"), split=2))
        with pytest.raises(RuntimeError, match="not every layer keeps the whole prompt"):
            engines.connect()

    def test_another_ratio(self) -> None:
        with pytest.raises(RuntimeError, match="same --block-size"):
            Engines(Deployment(1, 2)).connect()

    def test_one_that_pushes_other_kernel_blocks(self) -> None:
        worker = make_worker()
        connect(worker, "P")
        pairing.refuse_pusher(worker, peer_metadata(worker, "P"))
        other = peer_metadata(worker, "P", block_size=worker.block_size // 2)
        with pytest.raises(RuntimeError, match="pushes kernel blocks of 8"):
            pairing.refuse_pusher(worker, other)

    def test_a_worker_that_pushes_leaves_the_pairing_to_its_peer(self) -> None:
        worker = make_worker(groups=("full", "mamba"), block_size=8, kernel_block_size=4)
        connect(worker, "P")
        other = peer_metadata(worker, "P", physical_blocks_per_logical_kv_block=4, num_blocks=64)
        with pytest.raises(RuntimeError, match="ranks with 2 and with 4"):
            pairing.refuse_hybrid(worker, other)
        worker._TRANSFER_MODE = "push"
        pairing.refuse_hybrid(worker, other)
        pairing.refuse_other_size(worker, other)

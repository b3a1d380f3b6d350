"""Which of D's kernel blocks are zeroed after a receive: those behind what was read, no others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.support.kv_landing import Deployment, Engines
from tests.support.nixl_release import NixlConnectorWorker
from tests.support.nixl_worker import GroupKind, lives, make_worker, nixl_of, receive, step

unread_blocks = pytest.importorskip(
    "vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.unread_blocks", reason="0.26.0"
)

HYBRID: tuple[GroupKind, ...] = ("full", "mamba")


def caches_of(worker: Any, group: int = 0) -> list[torch.Tensor]:  # noqa: ANN401 - of any release
    names = worker.kv_cache_config.kv_cache_groups[group].layer_names
    return [worker.device_kv_caches[name] for name in names]


def hybrid(groups: tuple[GroupKind, ...] = HYBRID) -> NixlConnectorWorker:
    """A worker whose cache is NaN."""
    worker = make_worker(groups=groups, block_size=20, kernel_block_size=4, num_blocks=8)
    for cache in caches_of(worker, groups.index("full")):
        cache.fill_(torch.nan)
    return worker


def zeroed(worker: NixlConnectorWorker, group: int = 0) -> list[int]:
    """The kernel blocks that are zero on all layers; on none of them any other is in part."""
    found = []
    for cache in caches_of(worker, group):
        flat = cache.flatten(1)
        assert torch.equal((flat == 0).any(1), (flat == 0).all(1))
        found.append((flat == 0).all(1).nonzero().flatten().tolist())
    assert all(one == found[0] for one in found)
    return found[0]


@pytest.mark.parametrize(
    ("ours", "theirs", "rest"),
    [
        ([5, 6, 7, 8, 9], [1, 2, 3], [8, 9]),
        ([5, 6, 7, 8, 9], [1, 2, 3, 4], [9]),
        ([5, 6, 7, 8, 9], [1, 2, 3, 4, 5], []),
        ([5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6], []),
        ([15, 16, 17, 18, 19, 5, 6, 7, 8, 9], [1, 2, 3], [5, 6, 7, 8, 9, 18, 19]),
        ([], [1, 2], []),
    ],
)
def test_what_is_behind_the_shorter_list(
    ours: Sequence[int], theirs: Sequence[int], rest: Sequence[int]
) -> None:
    worker = hybrid()
    unread_blocks.zero_unread(worker, [ours, [4]], [theirs, [2]])
    assert zeroed(worker) == rest


def test_nothing_is_done_where_lists_are_equally_long() -> None:
    worker = hybrid()
    worker.device_kv_caches = None
    unread_blocks.zero_unread(worker, [[5, 6], [4]], [[1, 2], [2]])


def test_blocks_that_lie_beside_each_other_are_zeroed_in_one_go() -> None:
    assert list(unread_blocks._runs([5, 6, 7, 10, 11])) == [slice(5, 8), slice(10, 12)]


def test_each_group_has_lists_of_its_own() -> None:
    worker = hybrid(("mamba", "full", "full"))
    caches = worker.device_kv_caches  # which share their memory
    for name in worker.kv_cache_config.kv_cache_groups[1].layer_names:
        caches[name] = caches[name].clone()
    unread_blocks.zero_unread(worker, [[6], [5, 6], [10, 11]], [[1], [3, 4], [5]])
    assert (zeroed(worker, 1), zeroed(worker, 2)) == ([], [11])


def test_a_states_blocks_are_not_counted() -> None:
    worker = hybrid()
    unread_blocks.zero_unread(worker, [[5, 6], [3, 4]], [[1, 2], [2]])
    assert zeroed(worker) == []
    for part in (part for states in caches_of(worker, 1) for part in states):
        assert part.isnan().all()


def test_of_a_push_nothing_is_known() -> None:
    worker = hybrid()
    unread_blocks.zero_unread(worker, [[5, 6], [3]], ())
    assert zeroed(worker) == []


def test_a_model_without_states_leaves_no_nan() -> None:
    worker = hybrid(("full",))
    unread_blocks.zero_unread(worker, [[5, 6]], [[1]])
    assert zeroed(worker) == []


def test_keys_and_values_may_come_first_where_blocks_do_in_memory() -> None:
    worker = hybrid()
    for name in worker.kv_cache_config.kv_cache_groups[0].layer_names:
        pages = torch.full((worker.num_blocks, 2, 3), torch.nan)
        worker.device_kv_caches[name] = pages.transpose(0, 1)
    unread_blocks.zero_unread(worker, [[5, 6, 7], [4]], [[1], [2]])
    for cache in caches_of(worker):
        assert (cache == 0).all(2).all(0).nonzero().flatten().tolist() == [6, 7]


def test_layers_that_have_no_cache_here_are_passed_over() -> None:
    worker = hybrid()
    worker.kv_cache_config.kv_cache_groups[0].layer_names.append("elsewhere")
    unread_blocks.zero_unread(worker, [[5, 6], [4]], [[1], [2]])
    assert worker.device_kv_caches["group0.layer0"][6].eq(0).all()


class TestReceives:
    """D's blocks have ten kernel blocks, P's six; it is asked for one block of each."""

    @staticmethod
    def engines(deployment: Deployment, ours: int = 1) -> Engines:
        engines = Engines(deployment)
        engines.connect()
        for cache in caches_of(engines.decode):
            cache.fill_(torch.nan)
        for side in engines.ranks:
            for cache in caches_of(side):
                cache.fill_(5)
        receive(
            engines.decode,
            local_blocks=[[ours], [2]],
            remote_blocks=[[1], [2]],
            tp_size=len(engines.ranks),
        )
        return engines

    def test_once_it_is_complete(self) -> None:
        decode = self.engines(Deployment(6, 10, groups=HYBRID)).decode
        [read] = nixl_of(decode).reads
        nixl_of(decode).move(read)
        lives(step, decode)
        assert zeroed(decode) == []
        nixl_of(decode).finish(read)
        assert lives(step, decode) == (set(), {"req-d"})
        assert zeroed(decode) == [16, 17, 18, 19]
        for cache in caches_of(decode):
            assert (cache[10:16] == 5).all()
            assert cache[30:].isnan().all()
            assert cache[:10].isnan().all()

    def test_of_several_ranks_after_the_last(self) -> None:
        groups: tuple[GroupKind, ...] = ("full", "kda")
        deployment = Deployment(6, 10, groups=groups, mla=True, ranks=(2, 1))
        decode = self.engines(deployment).decode
        first, last = nixl_of(decode).reads
        nixl_of(decode).finish(first)
        assert lives(step, decode) == (set(), set())
        assert zeroed(decode) == []
        nixl_of(decode).finish(last)
        assert lives(step, decode) == (set(), {"req-d"})
        assert zeroed(decode) == [16, 17, 18, 19]

    def test_not_where_it_failed(self) -> None:
        decode = self.engines(Deployment(6, 10, groups=HYBRID)).decode
        nixl_of(decode).fail(*nixl_of(decode).reads)
        assert lives(step, decode)[1] == {"req-d"}
        assert zeroed(decode) == []

    def test_not_where_lists_are_equal(self) -> None:
        decode = self.engines(Deployment(6, 6, groups=HYBRID)).decode
        nixl_of(decode).finish(*nixl_of(decode).reads)
        assert lives(step, decode)[1] == {"req-d"}
        assert zeroed(decode) == []

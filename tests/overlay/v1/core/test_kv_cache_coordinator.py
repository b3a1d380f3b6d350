"""Hits are held while groups load, and no longer: nothing else differs from stock."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

from tests.support.decode_engine import DecodeEngine
from tests.support.nixl_worker import connect, nixl_of

coordinator = pytest.importorskip(
    "vllm_overlay.v1.core.kv_cache_coordinator", reason="up to 0.23.0"
)

BLOCKS = 18


def play(seed: int) -> tuple[list[tuple[list[int], ...]], DecodeEngine]:
    """Random requests, with shared prompts, some of them received; what blocks each was given."""
    chance = Random(seed)  # noqa: S311 - repeatable is what it has to be
    engine = DecodeEngine(groups=("full", "sliding"), num_blocks=BLOCKS)
    connect(engine.worker, "P", num_blocks=64)
    manager, given = engine.scheduler.kv_cache_manager, []
    for i in range(40):
        if chance.random() < 0.5 and len(engine.scheduler.requests) < 4:
            shared = [1000 * chance.randrange(2) + j for j in range(16 * chance.randrange(4))]
            prompt = [*shared, *(10_000 + 100 * i + j for j in range(chance.randint(1, 40)))]
            theirs = list(range(1, -(-len(prompt) // 16) + 1))
            received = chance.random() < 0.7
            engine.ask(f"r{i}", prompt, [theirs, theirs] if received else None, max_tokens=3)
        for read in nixl_of(engine.worker).in_flight():
            if chance.random() < 0.7:
                nixl_of(engine.worker).finish(read)
        engine.step()
        given += [manager.get_block_ids(req_id) for req_id in engine.scheduler.requests]
    while engine.scheduler.has_requests():
        nixl_of(engine.worker).finish(*nixl_of(engine.worker).in_flight())
        engine.step()
    return given, engine


@pytest.mark.parametrize("seed", range(20))
def test_no_block_is_given_twice_and_none_is_lost(seed: int) -> None:
    given, engine = play(seed)
    for groups in given:
        blocks = [block for group in groups for block in group if block]
        assert len(blocks) == len(set(blocks))
    pool = engine.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == BLOCKS - 1
    assert all(block.ref_cnt == 0 for block in pool.blocks if not block.is_null)


class Group:
    """A plugin's group, with a pool of its own, which claims what it hits, or makes nothing of it.

    Attributes:
        free: the pool's queue of free blocks.
        hit: the block that the prefix cache has.
    """

    block_size = 16

    def __init__(self, first: int, *, claims: bool) -> None:
        self.hit, *others = [KVCacheBlock(first + i) for i in range(4)]
        self.free = FreeKVCacheBlockQueue([self.hit, *others])
        self.block_pool = SimpleNamespace(free_block_queue=self.free)
        self._claims = claims

    def get_num_skipped_tokens(self, tokens: int) -> int:
        return 0

    def claim(self) -> None:
        if not self._claims:
            return
        if self.hit.ref_cnt == 0:
            self.free.remove(self.hit)
        self.hit.ref_cnt += 1


def test_of_groups_with_pools_of_their_own_each_keeps_its_count() -> None:
    claiming, other, idle = groups = (
        Group(0, claims=True),
        Group(9, claims=True),
        Group(20, claims=False),
    )
    kept: Any = SimpleNamespace(block_pool=claiming.block_pool, single_type_managers=groups)

    def allocate(self: object, request_id: str, hits: object, local: int, external: int) -> None:
        assert all(group.free.num_free_blocks == 3 for group in groups), "held"
        for group in groups:
            group.claim()

    hits = tuple([group.hit] for group in groups)
    coordinator.claims_hits_first(allocate)(kept, "r", hits, 16, 16)
    for group, free in ((claiming, 3), (other, 3), (idle, 4)):
        assert group.free.num_free_blocks == len(group.free.get_all_free_blocks()) == free


def test_a_place_without_a_block_is_nothing_to_hold() -> None:
    """Of a prompt's states the cache has one, and none of those in front of it."""
    group, nowhere = Group(0, claims=True), KVCacheBlock(99)
    nowhere.is_null = True
    kept: Any = SimpleNamespace(single_type_managers=[group])

    def allocate(*_: object) -> None:
        assert (group.hit.ref_cnt, nowhere.ref_cnt) == (1, 0)
        group.claim()

    coordinator.claims_hits_first(allocate)(kept, "r", ([nowhere, group.hit],), 32, 16)
    assert group.free.num_free_blocks == 3


def test_what_cannot_be_allocated_holds_nothing() -> None:
    """Dynamo's memory service makes "no blocks" of an exception."""
    group = Group(0, claims=True)
    kept: Any = SimpleNamespace(single_type_managers=[group])

    def allocate(*_: object) -> None:
        raise ValueError("no blocks")

    with pytest.raises(ValueError, match="no blocks"):
        coordinator.claims_hits_first(allocate)(kept, "r", ([group.hit],), 16, 16)
    assert group.free.num_free_blocks == 4

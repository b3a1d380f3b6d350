"""Hits are held while groups load, and no longer: nothing else differs from stock."""

from __future__ import annotations

from random import Random

import pytest

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

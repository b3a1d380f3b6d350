"""Which free blocks a load takes while steps run."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from vllm_overlay.v1.core.block_pool import null_id, sparing


def queue(pool: BlockPool) -> list[int]:
    return [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]


def backwards(pool: BlockPool) -> Iterator[int]:
    block: KVCacheBlock | None = pool.free_block_queue.fake_free_list_tail.prev_free_block
    while block is not None and block is not pool.free_block_queue.fake_free_list_head:
        yield block.block_id
        block = block.prev_free_block


def left(pool: BlockPool, blocks: list[KVCacheBlock]) -> None:
    """Blocks that a step may still use are freed."""
    pool.notes_freed(blocks)  # from 0.24.0 on who frees them says so, before it is `free_blocks`
    pool.free_blocks(blocks)


def test_of_a_plugins_queue_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = BlockPool(4, enable_caching=False, hash_block_size=16)
    pool.step_begins(2)
    pool.notes_freed(pool.get_new_blocks(1))
    monkeypatch.setattr(pool, "free_block_queue", object())
    assert pool.has_for(16, 1)
    monkeypatch.delattr(pool, "free_block_queue")
    assert pool.has_for(16, 1)


def test_a_plugins_pool_is_told_of_nothing() -> None:
    plugins, pool = SimpleNamespace(), BlockPool(4, enable_caching=False, hash_block_size=16)
    sparing(plugins).step_begins(2)
    sparing(plugins).notes_freed(pool.get_new_blocks(1))
    assert sparing(plugins).has_for(16, 100)
    assert vars(plugins) == {}
    assert sparing(pool) is pool


def test_a_plugins_pool_may_have_no_null_block() -> None:
    assert null_id(BlockPool(4, enable_caching=False, hash_block_size=16)) == 0
    assert null_id(SimpleNamespace(null_block=None)) is None
    assert null_id(SimpleNamespace()) is None


@pytest.mark.parametrize("seed", range(200))
def test_a_load_takes_the_first_blocks_that_no_step_uses(seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311 - repeatable, no secret
    pool = BlockPool(12, enable_caching=False, hash_block_size=16)
    order = rng.sample(pool.get_new_blocks(11), 11)
    pool.free_block_queue.append_n(order)
    used = rng.sample(order, rng.randrange(12))
    pool.step_begins(2)
    pool.notes_freed(used[::2])
    pool.step_begins(2)
    pool.notes_freed(used[1::2])
    count = rng.randrange(12)
    suited = [block.block_id for block in order if block not in used]
    assert pool.has_for(16, count) == (count <= len(suited))
    taken = suited[:count] if count <= len(suited) else []
    others = [block.block_id for block in order if block.block_id not in taken]
    assert queue(pool) == taken + others
    assert [*backwards(pool)] == queue(pool)[::-1]
    assert pool.get_num_free_blocks() == 11


def test_blocks_suit_everybody_when_the_steps_have_ended() -> None:
    pool = BlockPool(4, enable_caching=False, hash_block_size=16)
    pool.step_begins(3)
    left(pool, blocks := pool.get_new_blocks(3))
    pool.step_begins(3)
    assert not pool.has_for(16, 1)
    assert pool.has_for(0, 3)  # it computes, after the step
    pool.step_ends()
    assert pool.has_for(16, 3)
    pool.step_ends()
    pool.step_ends()  # of one that somebody else began
    pool.notes_freed(blocks)
    assert pool.has_for(16, 3)


def test_what_is_freed_last_is_in_use_the_longest() -> None:
    pool = BlockPool(3, enable_caching=False, hash_block_size=16)
    first, second = pool.get_new_blocks(2)
    pool.step_begins(3)
    left(pool, [first])
    pool.step_begins(3)
    left(pool, [second])
    assert not pool.has_for(16, 1)
    pool.step_ends()
    assert pool.has_for(16, 1)
    assert not pool.has_for(16, 2)
    assert queue(pool) == [first.block_id, second.block_id]


def test_steps_whose_end_is_not_told_are_forgotten() -> None:
    pool = BlockPool(3, enable_caching=False, hash_block_size=16)
    blocks = pool.get_new_blocks(2)
    pool.step_begins(2)
    left(pool, blocks)
    pool.step_begins(2)
    assert not pool.has_for(16, 1)
    pool.step_begins(2)
    assert pool.has_for(16, 2)
    assert len(pool._freed) == 2

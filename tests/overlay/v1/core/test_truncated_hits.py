"""What is found is cut as on stock, but where there are fewer blocks of states."""

from __future__ import annotations

import pytest
from vllm.v1.core.kv_cache_manager import KVCacheManager

from tests.support.hybrid_engine import engine_of
from tests.support.nixl_worker import EngineDiedError, attempt
from tests.support.state_engine import StateEngine

pytest.importorskip("vllm_overlay.v1.core.truncated_hits", reason="0.27.0 and 0.27.1")

BLOCK = 16


@pytest.mark.parametrize("states", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("attention", [1, 2, 3])
@pytest.mark.parametrize("whole", [0, 1, 2])
def test_as_many_blocks_as_there_are(attention: int, states: int, whole: int) -> None:
    manager = engine_of(StateEngine, mode="align", prefix_caching=True).scheduler.kv_cache_manager
    pool = manager.block_pool.blocks
    found = manager.create_kv_cache_blocks((pool[1 : 1 + attention], pool[10 : 10 + states]))
    arguments = manager, found, whole * BLOCK
    cut = attempt(manager.truncate_computed_blocks, found, whole * BLOCK)
    stock = attempt(KVCacheManager.truncate_computed_blocks.__wrapped__, *arguments)
    if states < whole and attention >= whole:
        assert isinstance(stock, EngineDiedError)
        assert [list(group) for group in getattr(cut, "blocks", ())] == [
            pool[1 : 1 + whole],
            pool[10 : 10 + states],
        ]
    else:
        assert (type(cut), getattr(cut, "blocks", 0)) == (type(stock), getattr(stock, "blocks", 0))

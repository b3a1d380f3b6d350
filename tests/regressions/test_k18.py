"""K18: a load into one KV-cache group takes no block that the prefix cache holds for another."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.core.sched.scheduler import Scheduler

from tests.support.nixl_worker import connect
from tests.support.overlapped_engine import OverlappedEngine

SHARED = range(48)  # three blocks of 16 tokens; a window is two

HOW: list[dict[str, Any]] = [{}, {"depth": 1, "scheduler": Scheduler}]


def with_hits_first_to_go(**config: Any) -> OverlappedEngine:  # noqa: ANN401 - handed on
    """An engine that has `SHARED` in its prefix cache, in the blocks that were freed first."""
    engine = OverlappedEngine(groups=("full", "sliding"), num_blocks=13, **config)
    connect(engine.worker, "P", num_blocks=64)
    for req_id, prompt in {"before": SHARED, "others": range(500, 548)}.items():
        engine.ask(req_id, prompt, max_tokens=1)
        assert engine.run()
    return engine


@pytest.mark.parametrize("config", HOW, ids=["async", "sync"])
@pytest.mark.parametrize("own", [18, 29])
def test_what_is_read_is_the_requests_own(own: int, config: dict[str, Any]) -> None:
    engine = with_hits_first_to_go(**config)
    prompt = [*SHARED, *range(1000, 1000 + own)]
    engine.ask("received", prompt, [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5]], max_tokens=2)
    assert engine.run(), "the engine has something left to do"
    assert engine.finished["received"] == "length"
    assert engine.computed["received"] <= 3, "the prompt was computed, it should be received"
    assert engine.wrong == []


def test_each_group_has_blocks_of_its_own() -> None:
    engine = with_hits_first_to_go(**HOW[1])
    engine.ask("received", [*SHARED, *range(1000, 1020)], [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5]])
    engine.advance()
    full, window = engine.scheduler.kv_cache_manager.get_block_ids("received")
    assert set(full).isdisjoint(window)

"""A request that was loaded keeps the block that the model runner knows its state by."""

from __future__ import annotations

import pytest

from tests.support.decode_engine import DecodeEngine
from tests.support.hybrid_engine import engine_of
from tests.support.nixl_worker import connect
from tests.support.table_engine import TableEngine

pytest.importorskip("vllm_overlay.v1.core.running_states", reason="0.26.0 to 0.27.1")


@pytest.mark.parametrize("tokens", [20, 21, 36])
@pytest.mark.parametrize("guesses", [0, 1])
def test_scheduler_and_model_runner_know_one_table(guesses: int, tokens: int) -> None:
    engine = engine_of(
        TableEngine,
        mode="align",
        guesses=guesses,
        drafts=bool(guesses),
        unit=4,
        prefix_caching=True,
    )
    connect(engine.worker, "P", num_blocks=64)
    states = [10, 11, 12][: 1 + guesses]
    engine.ask("is loaded", range(1000, 1000 + tokens), [[1, 2, 3], states], max_tokens=500)
    for _ in range(8):
        engine.advance()
    running = (tokens + 6) // 16
    _, known = engine.scheduler.kv_cache_manager.get_block_ids("is loaded")
    assert engine.tables["is loaded"][1][running] == known[running]


@pytest.mark.parametrize("mode", ["none", "all"])
def test_other_modes_note_nobody(mode: str) -> None:
    engine = engine_of(DecodeEngine, mode=mode)
    engine.ask("runs", range(20))
    assert engine.step().computed == {"runs": (0, 20)}

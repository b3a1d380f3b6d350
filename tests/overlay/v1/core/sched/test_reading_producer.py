"""Whose loads keep off what running steps use: those of a producer that reads; else as on stock."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.core.sched.scheduler import Scheduler

from tests.support.overlapped_engine import OverlappedEngine

pytest.importorskip("vllm_overlay.v1.core.sched.reading_producer", reason="from 0.24.0 on")

READS = {"bidirectional_kv_xfer": True}
OF_SEVERAL = {"connectors": [{}, {"kv_connector_extra_config": READS}]}


def made(role: str, extra: dict[str, Any], depth: int = 2, **config: Any) -> OverlappedEngine:  # noqa: ANN401 - handed on
    def make(**how: Any) -> Scheduler:  # noqa: ANN401 - as in the class
        transfer = how["vllm_config"].kv_transfer_config
        transfer.kv_role = role
        transfer.kv_connector_extra_config.update(extra)
        return Scheduler(**how)

    scheduler: Any = make
    return OverlappedEngine(scheduler=scheduler, depth=depth, **config)


def is_its_own(engine: OverlappedEngine) -> bool:
    return "_free_request_blocks" in vars(engine.scheduler)


@pytest.mark.parametrize(
    "extra",
    [READS, OF_SEVERAL, {"connectors": [{"kv_connector_extra_config": OF_SEVERAL}]}],
)
def test_a_producer_that_reads(extra: dict[str, Any]) -> None:
    assert is_its_own(made("kv_producer", extra))


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"bidirectional_kv_xfer": False},
        {"connectors": None},
        {"connectors": ["NixlConnector", {}, {"kv_connector_extra_config": None}]},
        {"connectors": {"kv_connector_extra_config": READS}},
    ],
)
def test_another_producer_is_stocks(extra: dict[str, Any]) -> None:
    assert not is_its_own(made("kv_producer", extra))


@pytest.mark.parametrize("role", ["kv_both", "kv_consumer"])
@pytest.mark.parametrize("extra", [{}, READS])
def test_so_is_who_consumes(role: str, extra: dict[str, Any]) -> None:
    assert not is_its_own(made(role, extra))


def test_so_is_who_has_one_step_at_a_time() -> None:
    assert not is_its_own(made("kv_producer", READS, depth=1))


def left(extra: dict[str, Any], turns: int = 1) -> tuple[OverlappedEngine, int]:
    """An engine whose only request was aborted in a step that runs, and how many blocks it has."""
    engine = made("kv_producer", extra, num_blocks=8)
    every = engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    engine.ask("left", range(40), max_tokens=20)
    for _ in range(turns):
        engine.advance()
    engine.abort("left")
    assert len(engine.steps) == 1, "the step still runs"
    return engine, every


@pytest.mark.parametrize("extra", [{}, READS])
def test_what_is_aborted_is_free_at_once_and_the_cache_can_be_reset(extra: dict[str, Any]) -> None:
    """As on stock, where a producer holds nothing back."""
    engine, every = left(extra)
    assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == every
    assert engine.scheduler.reset_prefix_cache()


@pytest.mark.parametrize("turns", [1, 2])
def test_a_load_gets_what_was_in_use_once_the_steps_have_ended(turns: int) -> None:
    engine, every = left(READS, turns)
    pool = engine.scheduler.kv_cache_manager.block_pool
    assert not pool.has_for(16, every)
    engine.advance()
    assert pool.has_for(16, every)


def test_what_is_freed_is_in_use_while_as_many_steps_run_as_may() -> None:
    """That is as many as there are pipeline stages, here two, or one more."""
    engine, every = left(READS)
    for _ in range(3):
        assert not engine.scheduler.kv_cache_manager.block_pool.has_for(16, every)
        engine.scheduler.schedule()


@pytest.mark.parametrize("extra", [{}, READS])
def test_a_shortage_preempts_one(extra: dict[str, Any]) -> None:
    engine = made("kv_producer", extra, num_blocks=7)
    for number in range(3):
        engine.ask(f"req-{number}", range(100 * number, 100 * number + 31), max_tokens=4)
        engine.advance()
    requests = list(engine.scheduler.requests.values())
    while not any(request.num_preemptions for request in requests):
        engine.advance()
    assert [request.num_preemptions for request in requests] == [0, 0, 1]
    assert engine.run()
    assert engine.wrong == []

"""What is decided while steps run: stock's decisions, but for loads."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

from tests.support.nixl_worker import connect
from tests.support.overlapped_engine import OverlappedEngine

steps = pytest.importorskip("vllm_overlay.v1.core.sched.steps", reason="up to 0.25.1")
from vllm_overlay.v1.core.block_pool import SparesRunningSteps  # noqa: E402 - after the skip

frees_at_once = pytest.mark.skipif(
    hasattr(Scheduler, "_drain_deferred_frees"),
    reason="from 0.24.0 on upstream holds back the blocks of requests that leave",
)


def make(**config: Any) -> OverlappedEngine:  # noqa: ANN401 - handed on
    engine = OverlappedEngine(**{"num_blocks": 8, **config})
    connect(engine.worker, "P", num_blocks=64)
    return engine


# ---------------------------------------------------------------- what stays as on stock


def play(engine: OverlappedEngine, seed: int, turns: int = 150) -> Iterator[object]:
    """Requests come and leave; yields all that is decided."""
    rng = random.Random(seed)  # noqa: S311 - repeatable, no secret
    for turn in range(turns):
        if rng.random() < 0.35:
            prompt = [rng.randrange(3)] * 16 + [1000 + turn] * rng.randrange(1, 70)
            remote = None
            if rng.random() < 0.5 and engine.scheduler.connector is not None:
                remote = [[10 + i for i in range(-(-len(prompt) // 16))]]
            stops = rng.choice([None, 1, 2, 3])
            engine.ask(str(turn), prompt, remote, max_tokens=rng.randrange(1, 8), stops_after=stops)
        if rng.random() < 0.1 and engine.scheduler.requests:
            engine.abort(rng.choice([*engine.scheduler.requests]))
        if rng.random() < 0.03:
            yield engine.scheduler.reset_prefix_cache()
        decided = engine.advance()
        yield shown(decided)
        yield sorted(engine._reusable())
    yield engine.run()
    yield engine.finished
    yield sorted(engine._reusable())


def shown(decided: SchedulerOutput | None) -> object:
    if decided is None:
        return None
    cached = decided.scheduled_cached_reqs
    return (
        decided.num_scheduled_tokens,
        [(new.req_id, new.block_ids) for new in decided.scheduled_new_reqs],
        [*zip(cached.req_ids, cached.new_block_ids, strict=True)],
        sorted(decided.preempted_req_ids or ()),
    )


@pytest.mark.parametrize("groups", [("full",), ("sliding",)], ids="-".join)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "config",
    [
        {"connected": False},
        {"connected": False, "depth": 3, "scheduler": Scheduler},
        {"depth": 1, "scheduler": Scheduler},
    ],
    ids=["async-no-connector", "stages-no-connector", "sync"],
)
def test_every_decision_is_stocks_without_loads_or_without_overlap(
    config: dict[str, Any], seed: int, groups: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    patched = [*play(make(num_blocks=16, groups=groups, **config), seed)]
    for hook, result in ("step_begins", None), ("notes_freed", None), ("has_for", True):
        monkeypatch.setattr(SparesRunningSteps, hook, lambda *_, result=result: result)
    assert patched == [*play(make(num_blocks=16, groups=groups, **config), seed)]


@frees_at_once
def test_a_preemption_takes_one_request() -> None:
    engine = make()
    for token in 1, 2, 3:
        engine.ask(str(token), [token] * 31, max_tokens=40)
    requests = {**engine.scheduler.requests}
    while not any(request.num_preemptions for request in requests.values()):
        engine.advance()
    assert [req_id for req_id, one in requests.items() if one.num_preemptions] == ["3"]
    assert engine.run()


@frees_at_once
def test_what_is_aborted_is_free_at_once() -> None:
    engine = make()
    free = engine._reusable()
    engine.ask("left", range(40), max_tokens=20)
    engine.advance()
    engine.advance()
    engine.abort("left")
    assert engine._reusable() == free
    assert engine.scheduler.reset_prefix_cache()
    engine.ask("computed", range(100, 180), max_tokens=1)  # computes after the step
    decided = engine.advance()
    assert decided is not None
    assert "computed" in decided.num_scheduled_tokens


# ---------------------------------------------------------------- what is right with loads


@pytest.mark.parametrize("groups", [("full",), ("sliding",)], ids="-".join)
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("scheduler", "depth"), [(AsyncScheduler, 2), (Scheduler, 3)])
def test_nobody_reads_what_another_wrote(
    scheduler: type[Scheduler], depth: int, seed: int, groups: tuple[Any, ...]
) -> None:
    engine = make(num_blocks=16, scheduler=scheduler, depth=depth, groups=groups)
    free = engine._reusable()
    trace = [*play(engine, seed)]
    assert trace[-3] is True, "requests wait for ever"
    assert engine.wrong == []
    assert engine._reusable() == free


def test_a_request_that_waits_for_blocks_gets_them_when_the_steps_have_ended() -> None:
    engine = make()
    engine.ask("left", range(40), max_tokens=20)
    engine.advance()
    engine.advance()
    engine.abort("left")
    engine.ask("received", range(1000, 1079), [[10, 11, 12, 13, 14]], max_tokens=1)
    first = engine.advance()
    assert first is not None
    assert not engine.blocks_of("received")
    engine.advance()
    assert engine.blocks_of("received")


def test_a_load_may_hit_what_a_running_step_still_writes() -> None:
    engine = make()
    engine.ask("left", range(40), max_tokens=20)
    engine.advance()
    engine.advance()
    engine.abort("left")
    engine.ask("received", range(60), [[10, 11, 12, 13]], max_tokens=1)
    engine.advance()
    assert engine.blocks_of("received") >= {1, 2}  # the prefix, computed by a step that runs
    assert engine.run()
    assert engine.wrong == []


def test_a_load_does_not_wait_for_ever_on_who_does_not_say_when_a_step_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SparesRunningSteps, "step_ends", lambda _: None)
    engine = make()
    engine.ask("left", range(40), max_tokens=20, stops_after=2)
    while "left" not in engine.finished:
        engine.advance()
    engine.ask("received", range(1000, 1079), [[10, 11, 12, 13, 14]], max_tokens=1)
    assert engine.run()
    assert engine.finished["received"] == "length"


def test_a_pool_without_a_connector_is_told_nothing() -> None:
    engine = make(connected=False)
    engine.ask("computed", range(40))
    engine.advance()
    steps.step_begins(engine.scheduler)
    assert not engine.scheduler.kv_cache_manager.block_pool._freed
    steps.step_ends(engine.scheduler)


# ---------------------------------------------------------------- what upstream's way leaves open


def answered(engine: OverlappedEngine) -> None:
    assert engine.run()
    assert engine.finished["received"] == "length"
    assert engine.computed["received"] <= 2
    assert engine.wrong == []


@frees_at_once
def test_a_reset_of_the_prefix_cache_while_a_step_runs() -> None:
    engine = make()
    engine.ask("preempted", range(20), max_tokens=20)
    engine.advance()
    engine.advance()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.ask("received", range(1000, 1079), [[10, 11, 12, 13, 14]], max_tokens=1)
    answered(engine)


def test_a_window_moves_on_while_a_step_computes_what_it_leaves() -> None:
    engine = make(groups=("sliding",))
    engine.ask("long", range(90), max_tokens=4)
    engine.advance()
    engine.ask("received", range(1000, 1079), [[10, 11, 12, 13, 14]], max_tokens=1)
    answered(engine)

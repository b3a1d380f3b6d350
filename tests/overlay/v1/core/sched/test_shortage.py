"""Who waits for blocks, for how long, and who does not come in meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.kv_cache_interface import MambaSpec

from tests.support.overlapped_engine import OverlappedEngine

shortage = pytest.importorskip("vllm_overlay.v1.core.sched.shortage", reason="0.24.0 to 0.29.0")

TOKENS = 4


def full(*, connected: bool = True) -> OverlappedEngine:
    """An engine whose step runs, with five blocks: two requests have two each, and one is free.

    The next step of the older needs two blocks more: its prompt has two chunks.
    """
    engine = OverlappedEngine(num_blocks=6, connected=connected)
    engine.scheduler.scheduler_config.long_prefill_token_threshold = 32
    engine.scheduler.scheduler_reserve_full_isl = False  # admit it by its first chunk
    engine.ask("older", range(64), max_tokens=TOKENS)
    engine.ask("newer", range(100, 132), max_tokens=TOKENS)
    engine.advance()
    return engine


def test_nobody_comes_in_while_somebody_waits() -> None:
    engine = full()
    engine.ask("outside", range(200, 208), max_tokens=TOKENS)
    decided = engine.advance()
    assert decided is not None
    assert not decided.num_scheduled_tokens, "only `outside` finds a block"
    assert engine.run()
    assert set(engine.finished.values()) == {"length"}
    assert engine.computed["older"] <= 64 + TOKENS


def test_who_came_first_preempts_once_the_step_has_ended() -> None:
    engine = full()
    older, newer = (engine.scheduler.requests[req_id] for req_id in ("older", "newer"))
    engine.advance()
    assert newer.num_preemptions == 0, "its step runs"
    engine.advance()
    assert newer.num_preemptions == 1
    assert engine.run()
    assert older.num_preemptions == 0
    assert newer.num_preemptions == 1


def test_without_a_connector_nobody_waits() -> None:
    engine = full(connected=False)
    newer = engine.scheduler.requests["newer"]
    decided = engine.advance()
    assert decided is not None
    assert set(decided.num_scheduled_tokens) == {"older"}
    assert newer.num_preemptions == 1


OLD, MID, NEW = (
    SimpleNamespace(request_id=req_id, priority=priority, arrival_time=time, last_sched_seq=step)
    for req_id, priority, time, step in (("old", 5, 1, 7), ("mid", 9, 2, 8), ("new", 9, 3, 7))
)
"""Requests that run; the step that has number 8 is under way, and 7 is over."""


def scheduler(running: list[SimpleNamespace], **different: Any) -> SimpleNamespace:  # noqa: ANN401
    known = {
        "policy": SchedulingPolicy.FCFS,
        "running": running,
        "deferred_frees": [],
        "processed_step_seq": 7,
        "sched_step_seq": 8,
        "current_step": 9,
        "use_v2_model_runner": False,
        "num_spec_tokens": 0,
        "kv_cache_config": SimpleNamespace(kv_cache_groups=[]),
        "parallel_config": SimpleNamespace(pipeline_parallel_size=1),
        "scheduler_config": SimpleNamespace(async_scheduling=False),
    }
    return SimpleNamespace(**known | different)


@pytest.mark.parametrize(
    ("running", "waits"), [([NEW, OLD, MID], True), ([MID, OLD, NEW], False), ([MID], True)]
)
def test_the_last_is_who_is_preempted(running: list[SimpleNamespace], waits: bool) -> None:
    assert shortage.waits_for_running_step(scheduler(running), set()) is waits


@pytest.mark.parametrize(
    ("running", "waits"),
    [([MID, OLD], True), ([OLD, MID], True), ([MID, NEW, OLD], False), ([OLD, NEW, MID], False)],
)
def test_the_least_urgent_is_and_of_these_the_latest(
    running: list[SimpleNamespace], waits: bool
) -> None:
    asked = scheduler(running, policy=SchedulingPolicy.PRIORITY)
    assert shortage.waits_for_running_step(asked, set()) is waits


def test_who_would_run_on_is_preempted() -> None:
    asked = scheduler([OLD, MID], policy=SchedulingPolicy.PRIORITY)
    assert shortage.waits_for_running_step(asked, {"old"})
    assert not shortage.waits_for_running_step(asked, {"mid"})


def test_blocks_that_are_held_back_are_awaited() -> None:
    assert shortage.waits_for_running_step(scheduler([OLD], deferred_frees=[(8, [])]), {"old"})


def test_where_no_step_runs_nothing_is_awaited() -> None:
    """Blocks can be held back for the next step that computes; there may be none (copies)."""
    idle = scheduler([OLD], deferred_frees=[(9, [])], processed_step_seq=8)
    assert not shortage.waits_for_running_step(idle, set())


STATES = SimpleNamespace(
    kv_cache_groups=[
        SimpleNamespace(kv_cache_spec=MambaSpec(16, ((1,),), (torch.float32,))),
    ]
)
STAGES = {
    number: {"parallel_config": SimpleNamespace(pipeline_parallel_size=number)} for number in (2, 3)
}


@pytest.mark.parametrize(
    ("how", "waits"),
    [
        ({"kv_cache_config": STATES}, True),
        ({"kv_cache_config": STATES, "num_spec_tokens": 1}, False),
        ({"num_spec_tokens": 1}, True),
        (STAGES[2], True),
        (STAGES[3], False),
    ],
)
def test_nobody_waits_whom_the_worker_would_forget(how: dict[str, Any], waits: bool) -> None:
    """The first runner knows accepted guesses and sampled tokens by the rows of the last step."""
    assert shortage.waits_for_running_step(scheduler([MID], **how), set()) is waits
    second = scheduler([MID], **how, use_v2_model_runner=True)
    assert shortage.waits_for_running_step(second, set())


@pytest.mark.parametrize(
    ("asynchronous", "second_runner", "guesses"),
    [(True, False, []), (True, True, [-1, -1]), (False, False, [-1, -1])],
)
def test_who_pauses_goes_on_without_guesses_that_the_worker_forgets(
    asynchronous: bool, second_runner: bool, guesses: list[int]
) -> None:
    places = [-1, -1]
    here, left_out = (
        SimpleNamespace(**{**vars(one), "spec_token_ids": places}) for one in (OLD, MID)
    )
    asked = scheduler(
        [here, left_out],
        num_spec_tokens=2,
        use_v2_model_runner=second_runner,
        scheduler_config=SimpleNamespace(async_scheduling=asynchronous),
    )
    assert shortage.waits_for_running_step(asked, {"old"})
    assert left_out.spec_token_ids == guesses
    assert here.spec_token_ids == places == [-1, -1]


def test_where_nobody_pauses_all_keep_their_guesses() -> None:
    """Who is preempted is none that runs."""
    here, preempted = (SimpleNamespace(**vars(one), spec_token_ids=[-1]) for one in (MID, OLD))
    config = SimpleNamespace(async_scheduling=True)
    asked = scheduler([here, preempted], num_spec_tokens=1, scheduler_config=config)
    assert not shortage.waits_for_running_step(asked, set())
    assert here.spec_token_ids == [-1]


def test_places_for_guesses_are_of_who_was_in_the_step_before() -> None:
    engine = OverlappedEngine(num_blocks=7)
    engine.guess(2)
    for number in range(3):
        start = 100 * number
        engine.ask(f"req-{number}", range(start, start + 14 + number), max_tokens=24)
    last: set[str] = set()
    paused = 0
    while engine.steps or engine.scheduler.has_requests():
        decided = engine.advance()
        if decided is None or not decided.num_scheduled_tokens:
            continue
        guessed = decided.scheduled_spec_decode_tokens
        for req_id in guessed:
            assert req_id in last, "its guesses are places that nobody fills in"
        there = set(decided.num_scheduled_tokens)
        paused += len(last - there - set(engine.finished))
        last = there
    assert paused, "nobody was short of a block"
    assert engine.wrong == []


def test_only_the_step_in_which_somebody_is_short_lets_nobody_in() -> None:
    asked = scheduler([OLD])
    assert shortage.nobody_was_short(asked)
    shortage.waits_for_running_step(asked, set())
    assert not shortage.nobody_was_short(asked)
    asked.current_step += 1
    assert shortage.nobody_was_short(asked)

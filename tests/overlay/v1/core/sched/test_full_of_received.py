"""When a received request gives way, and when all is left as stock has it."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from tests.support.decode_engine import DecodeEngine
from tests.support.nixl_worker import connect, nixl_of
from tests.support.overlapped_engine import OverlappedEngine
from tests.support.prefill_engine import PrefillEngine
from tests.support.release import since
from vllm_overlay.distributed.kv_transfer.fix_counts import taken

full_of_received = pytest.importorskip(
    "vllm_overlay.v1.core.sched.full_of_received", reason="up to 0.30.0"
)


def full(
    asked: int = 3, *, drafts: int = 3, spare: int = 0, by_priority: bool = False
) -> DecodeEngine:
    """An engine whose cache is full of loads of two blocks each, `spare` blocks apart."""
    engine = DecodeEngine(num_blocks=2 * asked + 1 + spare)
    if by_priority:
        engine.serve_by_priority()
    engine.guess(drafts, eagle=True)  # without, a load has slots for them in 0.23.0 and 0.24.0
    connect(engine.worker, "P")
    for number in range(asked):
        start = 1000 * number
        engine.ask(f"req-{number}", range(start, start + 32), [[1, 2]], max_tokens=4)
    engine.step()
    return engine


def arrive(engine: DecodeEngine, count: int = 9) -> None:
    for read in nixl_of(engine.worker).in_flight()[:count]:
        read.state = "DONE"


def holders(engine: DecodeEngine) -> list[str]:
    requests = engine.scheduler.requests
    return [req_id for req_id in requests if engine.blocks_of(req_id)]


@pytest.mark.parametrize("preempted", [0, 1])
def test_the_last_gives_way_and_waits_as_one_preempted(preempted: int) -> None:
    engine = full()
    scheduler = engine.scheduler
    *_, last = scheduler.skipped_waiting
    for request in scheduler.requests.values():
        request.num_preemptions = preempted  # before it was received
        request.priority = 0 if request is last else 1  # nobody goes by that here
    arrive(engine)
    for _ in range(3):
        engine.step()
        if len(holders(engine)) < 3:
            break
    [gone] = set(scheduler.requests) - set(holders(engine))
    assert [request.request_id for request in scheduler.waiting] == [gone] == [last.request_id]
    assert scheduler.requests[gone].num_computed_tokens == 0
    assert not scheduler.finished_recving_kv_req_ids & {gone}
    assert taken()["RECEIVED_GAVE_WAY"] == 1


@pytest.mark.parametrize(
    ("by_priority", "sessions", "gives_way"),
    [(False, 1, "req-0"), (True, 1, "req-2"), (False, 3, "req-2")],
)
def test_a_clients_session_that_goes_on_gives_way_too(
    by_priority: bool, sessions: int, gives_way: str
) -> None:
    """It has blocks, and waits where new requests do; of equal priorities the oldest is first."""
    engine = full(by_priority=by_priority)
    scheduler = engine.scheduler
    arrive(engine)
    engine.step()
    for request in list(scheduler.requests.values())[:sessions]:
        assert scheduler._try_promote_blocked_waiting_request(request)
        scheduler.skipped_waiting.remove_requests([request])
        scheduler.waiting.add_request(request)
    engine.step()
    computed = engine.step().computed
    # It may have room to begin again at once.
    assert gives_way not in holders(engine) or computed == {gives_way: (16, 32)}
    waiting_or_running = [*scheduler.waiting, *scheduler.running]
    assert [request.request_id for request in waiting_or_running].count(gives_way) == 1
    assert taken()["RECEIVED_GAVE_WAY"] == 1


def test_one_at_a_time() -> None:
    engine = full(5)
    arrive(engine)
    held = []
    for _ in range(4):
        engine.step()
        held.append(len(holders(engine)))
    assert min(held) >= 4


def test_loads_under_way_are_awaited() -> None:
    engine = full()
    arrive(engine, 2)
    for _ in range(5):
        engine.step()
    assert len(holders(engine)) == 3


def test_blocks_that_others_have_are_awaited() -> None:
    engine = full(spare=1)
    engine.scheduler.kv_cache_manager.block_pool.get_new_blocks(1)  # a reader's, say
    arrive(engine)
    for _ in range(5):
        engine.step()
    assert len(holders(engine)) == 3


def test_a_pause_is_no_stand() -> None:
    engine = full()
    engine.scheduler._pause_state = PauseState.PAUSED_ALL
    arrive(engine)
    for _ in range(5):
        engine.step()
    engine.scheduler._pause_state = PauseState.UNPAUSED
    for held in (3, 2):  # the first step after it may have preempted who ran last
        engine.step()
        assert len(holders(engine)) == held


def test_a_plugins_pool_without_a_null_block_is_left_alone() -> None:
    engine = full()
    arrive(engine)
    engine.scheduler.kv_cache_manager.block_pool.null_block = None
    for _ in range(5):
        engine.step()
    assert len(holders(engine)) == 3


@pytest.mark.parametrize(("leaves", "held"), [("req-2", 3), ("without", 2)])
def test_blocks_that_a_finished_request_keeps_are_awaited(leaves: str, held: int) -> None:
    """Another connector saves them, say; who has none keeps nobody waiting."""
    engine = full()
    arrive(engine)
    engine.ask("without", range(5000, 5040))
    for _ in range(2):
        engine.step()
    for hook in ("request_finished", "request_finished_all_groups"):
        setattr(engine.scheduler.connector, hook, lambda *_: (True, None))
    engine.scheduler.finish_requests(leaves, RequestStatus.FINISHED_ABORTED)
    for _ in range(2):
        engine.step()
    assert len(holders(engine)) == held


@pytest.mark.skipif(not since("0.26.0"), reason="the scheduler itself tells the pool of steps")
def test_blocks_that_a_step_still_uses_are_awaited() -> None:
    engine = full()
    pool = engine.scheduler.kv_cache_manager.block_pool
    for freed in ([pool.blocks[1]], []):
        pool.step_begins(2)
        pool.notes_freed(freed)
    arrive(engine)
    for _ in range(5):
        engine.step()
    assert len(holders(engine)) == 3


@pytest.mark.parametrize(
    ("status", "held"), [(RequestStatus.RUNNING, 3), (RequestStatus.WAITING_FOR_STREAMING_REQ, 2)]
)
def test_blocks_that_others_share_are_not_awaited_but_whoever_runs_is(
    status: RequestStatus, held: int
) -> None:
    """As hits do. A step ends by itself; a session waits for its client and frees nothing then."""
    engine = full()
    scheduler = engine.scheduler
    arrive(engine)
    engine.ask("shares", range(32))
    shares = scheduler.requests["shares"]
    scheduler.waiting.remove_requests([shares])
    shares.status, shares.num_computed_tokens = status, 32
    runs = status == RequestStatus.RUNNING
    (scheduler.running if runs else scheduler.skipped_waiting).append(shares)
    [manager] = scheduler.kv_cache_manager.coordinator.single_type_managers
    manager.req_to_blocks["shares"] = [*manager.req_to_blocks["req-0"]]
    for _ in range(4):
        engine.step()
    assert len(holders(engine)) - 1 == held
    assert len(scheduler.requests) == 4


def test_the_null_block_is_nobodys() -> None:
    """Windows name it for what they no longer look at."""

    def received(count: int, num_blocks: int) -> DecodeEngine:
        engine = DecodeEngine(groups=("full", "sliding"), num_blocks=num_blocks)
        engine.guess(3, eagle=True)
        connect(engine.worker, "P")
        for number in range(count):
            start = 1000 * number
            blocks = [[1, 2, 3, 4, 5]] * 2
            engine.ask(f"req-{number}", range(start, start + 80), blocks, max_tokens=4)
        engine.step()
        return engine

    free = received(1, 64).scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    engine = received(3, 1 + 3 * (63 - free))
    arrive(engine)
    for _ in range(3):
        engine.step()
    assert taken()["RECEIVED_GAVE_WAY"] == 1


def test_one_alone_keeps_what_it_received() -> None:
    engine = full(1)
    arrive(engine)
    for _ in range(5):
        engine.step()
    assert holders(engine) == ["req-0"]


def urgent(received: int, blocks: int) -> DecodeEngine:
    """An engine of ten blocks: some have been received by so many, one more needs all."""
    engine = DecodeEngine(num_blocks=1 + 10)
    engine.serve_by_priority()
    connect(engine.worker, "P")
    for number in range(received):
        start = 1000 * number
        named = list(range(1, 1 + blocks))
        engine.ask(f"req-{number}", range(start, start + 16 * blocks - 4), [named], max_tokens=2)
        engine.scheduler.requests[f"req-{number}"].priority = 5
    engine.step()
    engine.ask("urgent", range(50_000, 50_156), [list(range(1, 11))], max_tokens=2)
    engine.scheduler.requests["urgent"].priority = 0
    return engine


def run(engine: DecodeEngine, steps: int = 80) -> dict[str, str]:
    """Let whatever is read arrive, unless it has failed; who has ended, and how."""
    ended: dict[str, str] = {}
    for _ in range(steps):
        arrive(engine)
        ended |= engine.step().finished
    return ended


@pytest.mark.parametrize(("received", "blocks"), [(1, 6), (9, 1)])
def test_who_is_more_urgent_gets_all_that_it_needs(received: int, blocks: int) -> None:
    engine = urgent(received, blocks)
    assert len(run(engine)) == received + 1
    assert taken()["RECEIVED_GAVE_WAY"] == received


def test_one_behind_a_failed_read_gives_way() -> None:
    """Who reads nothing of P may need a block more than it had been given for that."""
    engine = full(2)
    nixl_of(engine.worker).in_flight()[0].state = "ERR"
    for _ in range(80):
        for read in nixl_of(engine.worker).in_flight():
            read.state = read.state if read.state == "ERR" else "DONE"
        engine.step()
    assert not engine.scheduler.requests


def test_blocks_of_finished_requests_are_not_counted_one_by_one() -> None:
    """A P whose cache is full of what nobody has read yet stands still like that, step by step."""
    engine = PrefillEngine(num_blocks=1 + 40, async_scheduling=False, step_tokens=1000)
    for number in range(12):
        engine.prefill(f"req-{number}", range(100 * number, 100 * number + 64))
    for _ in range(4):
        engine.schedule()
        engine.update()
    scheduler = engine.scheduler
    assert (len(engine.answers), len(scheduler.running)) == (10, 0)
    assert len(scheduler.requests) == 12
    with mock.patch.object(
        scheduler.kv_cache_manager, "get_block_ids", wraps=scheduler.kv_cache_manager.get_block_ids
    ) as looked:
        scheduler.schedule()
    assert looked.call_count <= 1


def test_another_connectors_requests_wait_as_on_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "vllm_overlay.v1.core.sched.full_of_received.transfers_with_nixl", lambda _: False
    )
    engine = full()
    arrive(engine)
    for _ in range(5):
        engine.step()
    assert len(holders(engine)) == 3


def test_where_nothing_is_needed_to_run_nobody_gives_way() -> None:
    engine = full(drafts=0)
    arrive(engine)
    computed: dict[str, tuple[int, int]] = {}
    for _ in range(3):
        computed |= engine.step().computed
    assert len(computed) >= 1
    assert min(start for start, _ in computed.values()) >= 31  # nobody's prompt is computed


@pytest.mark.parametrize("drafts", [0, 3])
def test_who_runs_last_and_preempts_itself_makes_nobody_give_way(drafts: int) -> None:
    engine = DecodeEngine(num_blocks=8 if drafts else 7)
    scheduler = engine.scheduler
    engine.guess(drafts, eagle=bool(drafts))
    connect(engine.worker, "P")
    engine.ask("runs", range(30), max_tokens=40)
    engine.step()
    for number in (1, 2):
        start = 1000 * number
        engine.ask(f"req-{number}", range(start, start + 32), [[1, 2]], max_tokens=1)
    computed: Counter[str] = Counter()
    for _ in range(60):
        runs = scheduler.requests.get("runs")
        if drafts or (runs is not None and runs.num_computed_tokens >= 31):
            arrive(engine)
        for req_id, (start, end) in engine.step().computed.items():
            computed[req_id] += end - start
    last = 1 + (drafts if since("0.30.0") else 0)  # token, later with places for guesses beside it
    assert (computed["req-1"], computed["req-2"]) == (last, last)
    assert "RECEIVED_GAVE_WAY" not in taken()


def test_who_waits_for_something_else_than_blocks_makes_nobody_give_way() -> None:
    engine = full()
    engine.scheduler.max_num_running_reqs = 0
    arrive(engine)
    for _ in range(5):
        engine.step()
    assert len(holders(engine)) == 3


def test_a_step_that_runs_is_waited_for() -> None:
    engine = OverlappedEngine(num_blocks=8)
    scheduler = engine.scheduler
    if since("0.26.0"):
        pytest.skip("up to 0.25.1: from then on the pool is told of steps by a producer that reads")
    engine.guess(3, eagle=True)
    engine.serve_by_priority()
    connect(engine.worker, "P", num_blocks=64)
    engine.ask("runs", range(40), max_tokens=20, stops_after=3)
    engine.advance()
    for number in (1, 2):
        start = 1000 * number
        engine.ask(f"req-{number}", range(start, start + 32), [[1, 2]], max_tokens=1)
    while "runs" not in engine.finished:
        arrive(engine)
        engine.advance()
    engine.ask("first", range(3000, 3032), [[5, 6]], max_tokens=1)
    scheduler.waiting.remove_requests([first := scheduler.requests["first"]])
    first.priority = -1
    scheduler.waiting.add_request(first)
    while scheduler.has_requests():
        engine.advance()
        arrive(engine)
    assert (engine.computed["req-1"], engine.computed["req-2"]) == (1, 1)
    assert engine.wrong == []
    assert "RECEIVED_GAVE_WAY" not in taken()


@pytest.mark.parametrize("replaced", [False, True])
def test_refusals_leave_the_manager_as_it_was(replaced: bool) -> None:
    engine = full()
    scheduler, manager = engine.scheduler, engine.scheduler.kv_cache_manager
    if replaced:  # by a plugin, say
        manager.allocate_slots = manager.allocate_slots
    before = vars(manager).get("allocate_slots")
    arrive(engine)
    for _ in range(3):
        engine.step()
    assert taken()["RECEIVED_GAVE_WAY"] == 1
    scheduler.finish_requests([*scheduler.requests], RequestStatus.FINISHED_ABORTED)
    engine.step()
    assert vars(manager).get("allocate_slots") is before


def test_what_has_become_free_since_is_used_first() -> None:
    engine = full()
    arrive(engine)
    for _ in range(2):
        engine.step()
    engine.scheduler.finish_requests("req-1", RequestStatus.FINISHED_ABORTED)
    engine.step()
    assert engine.scheduler.running
    assert "RECEIVED_GAVE_WAY" not in taken()


@pytest.mark.parametrize(
    ("answers", "free", "in_vain"),
    [
        ([("other", None)], 1, True),
        ([("other", False)], 1, True),
        ([("other", True), ("other", None)], 1, True),  # it had leave to ask
        ([("last", None)], 1, False),
        ([("last", None), ("other", None)], 1, True),
        ([("first", "blocks"), ("other", None)], 1, False),  # and may have run and ended since
        ([("other", None)], 2, False),
        ([], 1, False),
    ],
)
def test_when_a_step_shows_that_nothing_can_run(
    answers: list[tuple[str, Any]], free: int, in_vain: bool
) -> None:
    def ask(request: Any) -> Any:  # noqa: ANN401 - an answer
        return request.answer

    pool = SimpleNamespace(get_num_free_blocks=lambda: 1)
    manager = SimpleNamespace(allocate_slots=ask, block_pool=pool)
    watch = full_of_received._Watch(manager)
    for req_id, answer in answers:
        request = SimpleNamespace(request_id=req_id, answer=answer)
        assert manager.allocate_slots(request) is answer
    watch.end()
    assert manager.allocate_slots is ask
    pool.get_num_free_blocks = lambda: free
    assert watch.saw_others_wait_in_vain(SimpleNamespace(request_id="last")) is in_vain


def test_plugins_see_the_code_of_schedule() -> None:
    """Some choose by the names of its locals, vllm-beam-search-plugin 0.1.5 as it is loaded."""
    assert "num_scheduled_tokens" in Scheduler.schedule.__code__.co_varnames

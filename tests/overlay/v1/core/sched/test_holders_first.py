"""Who is passed over when it finds no room, by where it stands and what it holds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import FCFSRequestQueue, PriorityRequestQueue
from vllm.v1.request import RequestStatus

module = pytest.importorskip("vllm_overlay.v1.core.sched.holders_first", reason="from 0.30.0 on")


LOADS = RequestStatus.WAITING_FOR_REMOTE_KVS
PROMOTES = {
    "kv_holding_waiting": "_handle_blocked_waiting_request",
    "skipped_waiting": "_try_promote_blocked_waiting_request",
}


class Stand:
    """One of a set, as a request is."""

    def __init__(self, computed: int, status: RequestStatus) -> None:
        self.num_computed_tokens, self.status = computed, status
        self.request_id, self.priority = str(id(self)), 0

    def __lt__(self, other: Stand) -> bool:
        return self.priority < other.priority


def request(computed: int = 0, status: RequestStatus = RequestStatus.WAITING) -> Any:  # noqa: ANN401 - a stand-in
    return Stand(computed, status)


def scheduler(
    holders: list[Any],
    waiting: list[Any],
    *,
    queue: str = "kv_holding_waiting",
    failed: tuple[Any, ...] = (),
    failing: tuple[Any, ...] = (),
    received: tuple[Any, ...] = (),
    pause: PauseState = PauseState.UNPAUSED,
) -> Any:  # noqa: ANN401 - a stand-in
    """`failed`: who is said to have lost what it received; `failing`: for some ranks, so far."""
    over, lost, done = ({r.request_id for r in some} for some in (failed, failing, received))

    def promote(one: Any) -> None:  # noqa: ANN401
        assert one.status == LOADS
        one.status = RequestStatus.WAITING
        asked.failed_recving_kv_req_ids.remove(one.request_id)

    asked = SimpleNamespace(
        **{queue: FCFSRequestQueue(holders), PROMOTES[queue]: promote},
        waiting=FCFSRequestQueue(waiting),
        failed_recving_kv_req_ids=over | lost,
        finished_recving_kv_req_ids=over | done,
        _inflight_prefills={*holders, *waiting},
        _pause_state=pause,
    )
    return asked


@pytest.mark.parametrize("queue", ["kv_holding_waiting", "skipped_waiting"])
def test_who_has_lost_its_blocks_waits_behind_those_that_hold_some(queue: str) -> None:
    lost, holder, new = request(), request(32), request()
    asked = scheduler([lost, holder], [new], queue=queue)
    assert module.lets_holders_run(asked, lost) is True
    assert list(getattr(asked, queue)) == [holder, lost]
    assert list(asked.waiting) == [new]
    # What would be kept free for it would keep out who stands in front of it there.
    assert asked._inflight_prefills == {holder, new}


def test_those_that_hold_none_stay_in_their_order() -> None:
    first, second, holder, third, last, fourth = (request(n) for n in (0, 0, 1, 0, 1, 0))
    asked = scheduler([first, second, holder, third, last, fourth], [])
    assert module.lets_holders_run(asked, first) is True
    assert list(asked.kv_holding_waiting) == [holder, last, first, second, third, fourth]
    assert asked._inflight_prefills == {holder, last, fourth}


def by_priority(*holders: Any, **more: Any) -> Any:  # noqa: ANN401
    """The more urgent stand in front."""
    for number, one in enumerate(holders):
        one.priority = number
    asked = scheduler([], [], **more)
    for queue in ("kv_holding_waiting", "waiting"):
        setattr(asked, queue, PriorityRequestQueue())
    for one in holders:
        asked.kv_holding_waiting.add_request(one)
        asked._inflight_prefills.add(one)
    return asked


def test_by_priority_it_waits_with_those_that_hold_none() -> None:
    first, second, holder, third = (request(n) for n in (0, 0, 1, 0))
    asked = by_priority(first, second, holder, third)
    assert module.lets_holders_run(asked, first) is True
    assert list(asked.kv_holding_waiting) == [holder, third]
    assert list(asked.waiting) == [first, second]
    assert asked._inflight_prefills == {holder, third}


def test_by_priority_a_pause_does_not_end_without_it() -> None:
    """Until then who waits in the other queue is neither admitted nor waited for."""
    lost, holder = request(), request(1)
    asked = by_priority(lost, holder, pause=PauseState.PAUSED_NEW)
    assert module.lets_holders_run(asked, lost) is False
    assert list(asked.kv_holding_waiting) == [lost, holder]
    assert asked._inflight_prefills == {lost, holder}


def test_who_holds_nothing_is_not_let_run_in_front_of_it() -> None:
    """In 0.30.0, who waited for a grammar."""
    lost, compiled = request(), request()
    asked = scheduler([lost, compiled], [], queue="skipped_waiting")
    assert module.lets_holders_run(asked, lost) is False
    assert list(asked.skipped_waiting) == [lost, compiled]


def test_where_all_were_skipped_there_is_nobody() -> None:
    assert module.lets_holders_run(scheduler([], [new := request()]), new) is False


@pytest.mark.parametrize(("computed", "status"), [(1, RequestStatus.WAITING), (0, LOADS)])
def test_who_holds_blocks_stays(computed: int, status: RequestStatus) -> None:
    received, holder = request(computed, status), request(32)
    asked = scheduler([received, holder], [])
    assert module.lets_holders_run(asked, received) is False
    assert list(asked.kv_holding_waiting) == [received, holder]


def test_where_nobody_else_holds_any_it_stays() -> None:
    lost = request()
    asked = scheduler([lost], [request()])
    assert module.lets_holders_run(asked, lost) is False
    assert list(asked.kv_holding_waiting) == [lost]


def test_a_new_request_without_room_stays() -> None:
    """Holders that still receive were skipped, and stand in their queue again after the step."""
    new, others = request(), [request(32), request(32)]
    asked = scheduler(others, [new])
    assert module.lets_holders_run(asked, new) is False
    assert list(asked.waiting) == [new]


def test_who_stands_in_front_of_the_holders_stays_when_another_finds_no_room() -> None:
    lost, holder, new = request(), request(32), request()
    asked = scheduler([lost, holder], [new])
    assert module.lets_holders_run(asked, new) is False
    assert list(asked.kv_holding_waiting) == [lost, holder]


@pytest.mark.parametrize("queue", PROMOTES)
def test_all_that_have_failed_give_up_their_blocks_and_the_first_is_looked_at_again(
    queue: str,
) -> None:
    first, holder, second = request(), request(32), request(0, LOADS)
    asked = scheduler([first, holder, second], [], queue=queue, failed=(second,))
    assert module.lets_holders_run(asked, first) is True
    assert list(getattr(asked, queue)) == [first, holder, second]
    assert second.status == RequestStatus.WAITING
    assert asked._inflight_prefills == {first, holder}
    assert module.lets_holders_run(asked, first) is True  # there was no room all the same
    assert list(getattr(asked, queue)) == [holder, first, second]


def test_who_loads_or_has_loaded_all_or_a_part_holds_blocks() -> None:
    lost, loads, arrived, part = request(), *(request(n, LOADS) for n in (0, 0, 16))
    holders = [lost, loads, arrived, part]
    asked = scheduler(holders, [], failing=(loads,), received=(arrived,), failed=(part,))
    assert module.lets_holders_run(asked, lost) is True
    assert list(asked.kv_holding_waiting) == [loads, arrived, part, lost]
    assert {one.status for one in (loads, arrived, part)} == {LOADS}

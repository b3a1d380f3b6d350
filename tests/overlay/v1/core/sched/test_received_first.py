"""A failed receive of several groups in a full cache: who waits for whom.

A request that starts again may need more blocks than it had received into. Others that hold what
they received need none, and theirs become free when they have run: they go first. On stock, which
answers the failed one from what it did not receive, they are answered too.
"""

from __future__ import annotations

import gc
import inspect
import itertools

import pytest
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from tests.support.decode_engine import DecodeEngine
from tests.support.nixl_worker import connect, nixl_of

invalid_blocks = pytest.importorskip(
    "vllm_overlay.v1.core.sched.invalid_blocks", reason="up to 0.29.0"
)

LOST = 128
"""Tokens: 8 blocks in each of two groups until it is computed; received, a window's are 2."""
OTHER = 32
"""2 blocks in each group; and one more in each for what is generated."""

_STATUS = vars(RequestStatus)
_OLDER = "WAITING_FOR_FSM"  # up to 0.18.1
COMPILES: RequestStatus = _STATUS.get(_OLDER) or _STATUS["WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR"]

_TOLD = inspect.signature(Scheduler._handle_invalid_blocks).parameters
_NOTHING_SCHEDULED: tuple[dict[str, int], ...] = ({},) if "num_scheduled_tokens" in _TOLD else ()
"""From 0.19.0 on."""


class Full:
    """An engine of two groups, which share a cache that is nearly full.

    Attributes:
        computed: request id -> first token that was computed, in the order of it.
        finished: request id -> why it ended, in the order of it.
    """

    def __init__(self, policy: SchedulingPolicy, blocks: int) -> None:
        # One more is the null block.
        self.engine = DecodeEngine(groups=("full", "sliding"), num_blocks=blocks + 1)
        if policy is SchedulingPolicy.PRIORITY:
            self.engine.serve_by_priority()
        self.scheduler = self.engine.scheduler
        self.nixl = nixl_of(self.engine.worker)
        self.computed: dict[str, int] = {}
        self.finished: dict[str, str] = {}
        self.everything = self.engine._reusable()
        self._starts = itertools.count(0, 1000)  # of prompts that have nothing in common
        for peer in "PQ":  # a read that fails says something about its own peer
            connect(self.engine.worker, peer)

    def ask(
        self,
        req_id: str,
        tokens: int,
        *,
        priority: int = 0,
        remote: bool = True,
        peer: str = "P",
        max_tokens: int = 2,
    ) -> Request:
        prompt = range(start := next(self._starts), start + tokens)
        blocks = [list(range(1, tokens // 16 + 1))] * 2 if remote else None
        self.engine.ask(req_id, prompt, blocks, max_tokens=max_tokens, engine_id=peer)
        request = self.scheduler.requests[req_id]
        self.scheduler.waiting.remove_requests([request])
        request.priority = priority
        self.scheduler.waiting.add_request(request)
        return request

    def compiles(self, request: Request) -> None:
        """Have a request wait for its grammar, which makes it one that is looked at before others.

        It waits no longer when its status is `WAITING`.
        """
        self.scheduler.waiting.remove_requests([request])
        request.status = COMPILES
        self.scheduler.skipped_waiting.add_request(request)

    def steps(self, count: int = 12) -> None:
        for _ in range(count):
            step = self.engine.step()
            for req_id, (first, _) in step.computed.items():
                self.computed.setdefault(req_id, first)
            self.finished.update(step.finished)

    def end(self, *req_ids: str, fail: bool = False) -> None:
        """Let the reads of these requests end."""
        by_block = {read.notif: read for read in self.nixl.in_flight()}
        reads = [by_block[f"{req_id}-at-p:1".encode()] for req_id in req_ids]
        (self.nixl.fail if fail else self.nixl.finish)(*reads)

    def all_is_over(self) -> bool:
        return not self.scheduler.requests and self.engine._reusable() == self.everything


def where_one_failed(policy: SchedulingPolicy, blocks: int = 18) -> Full:
    """Return an engine that receives for three requests, and has failed to for the first."""
    full = Full(policy, blocks)
    full.ask("lost", LOST, peer="Q")
    full.ask("one", OTHER)
    full.ask("two", OTHER)
    full.steps(1)
    full.end("lost", fail=True)
    return full


@pytest.fixture(params=SchedulingPolicy)
def policy(request: pytest.FixtureRequest) -> SchedulingPolicy:
    chosen: SchedulingPolicy = request.param
    return chosen


def test_others_run_and_then_the_one_that_failed(policy: SchedulingPolicy) -> None:
    full = Full(policy, blocks=18)
    lost = full.ask("lost", LOST, peer="Q")
    full.ask("one", OTHER)
    full.ask("two", OTHER)
    full.steps(1)
    full.end("lost", fail=True)
    full.end("one", "two")
    full.steps()
    assert list(full.finished) == ["one", "two", "lost"]
    assert full.computed == {"one": OTHER - 1, "two": OTHER - 1, "lost": 0}
    assert lost.num_preemptions == 0
    assert full.all_is_over()


def test_others_that_are_received_later_run_too(policy: SchedulingPolicy) -> None:
    full = where_one_failed(policy)
    full.end("two")
    full.steps()
    assert list(full.finished) == ["two"]
    full.end("one")
    full.steps()
    assert list(full.finished) == ["two", "one", "lost"]
    assert full.computed["lost"] == 0
    assert full.all_is_over()


def test_those_that_failed_keep_their_order(policy: SchedulingPolicy) -> None:
    full = Full(policy, blocks=24)
    names = ["lost 1", "lost 2"]
    for name in names:
        full.ask(name, LOST)
    full.ask("one", OTHER)
    full.steps(1)
    full.end(*names, fail=True)
    full.end("one")
    full.steps()
    assert list(full.finished) == ["one", *names]
    assert full.all_is_over()


def test_who_came_later_and_holds_nothing_waits_behind_it(policy: SchedulingPolicy) -> None:
    full = where_one_failed(policy)
    full.end("one")
    full.ask("later", OTHER, remote=False)  # would fit
    full.steps()
    assert list(full.finished) == ["one"]
    full.end("two")
    full.steps()
    assert list(full.finished) == ["one", "two", "lost", "later"]
    assert full.all_is_over()


def test_who_is_more_important_goes_before_it() -> None:
    full = where_one_failed(SchedulingPolicy.PRIORITY)
    full.steps()
    full.ask("urgent", OTHER, priority=-1)  # fits, if nothing is kept free for the one that failed
    full.steps(1)
    full.end("urgent")
    full.steps()
    assert list(full.finished) == ["urgent"]
    full.end("one", "two")
    full.steps()
    assert full.all_is_over()


def test_nothing_is_kept_free_for_it(policy: SchedulingPolicy) -> None:
    """Or who comes before it and would load waits for what is kept, and it for who is before it."""
    full = Full(policy, blocks=18)
    full.ask("lost", LOST, peer="Q")
    full.ask("one", OTHER)
    other = full.ask("other", OTHER)
    full.compiles(other)
    full.steps(1)
    full.end("lost", fail=True)
    full.steps(3)
    other.status = RequestStatus.WAITING
    full.end("one")
    full.steps()
    full.end("other")
    full.steps()
    assert set(full.finished) == {"one", "lost", "other"}
    assert full.all_is_over()


def test_by_priority_it_waits_for_nobody_else() -> None:
    full = Full(SchedulingPolicy.PRIORITY, blocks=18)
    full.ask("lost", LOST, peer="Q")
    full.ask("one", OTHER, max_tokens=20)
    other = full.ask("other", OTHER, remote=False)
    full.compiles(other)
    full.steps(1)
    full.end("lost", fail=True)
    full.end("one")
    full.steps(3)
    other.status = RequestStatus.WAITING  # and would fit
    full.steps(30)
    assert list(full.finished) == ["one", "lost", "other"]
    assert full.all_is_over()


def test_it_keeps_blocks_and_place_while_another_rank_writes_to_them() -> None:
    full = Full(SchedulingPolicy.FCFS, blocks=18)
    lost = full.ask("lost", LOST, peer="Q")
    one = full.ask("one", OTHER)
    full.steps(1)
    blocks = full.engine.blocks_of("lost")
    full.scheduler._handle_invalid_blocks(blocks, *_NOTHING_SCHEDULED)
    full.steps(1)
    assert lost.num_computed_tokens == 0
    assert full.engine.blocks_of("lost") == blocks
    assert list(full.scheduler.skipped_waiting) == [lost, one]
    full.end("lost", fail=True)
    full.end("one")
    full.steps()
    assert list(full.finished) == ["one", "lost"]


@pytest.mark.parametrize("when", ["it has not been looked at", "it waits"])
def test_its_client_leaves(policy: SchedulingPolicy, when: str) -> None:
    full = where_one_failed(policy)
    full.steps(1 if when == "it has not been looked at" else 3)
    full.scheduler.finish_requests("lost", RequestStatus.FINISHED_ABORTED)
    full.end("one", "two")
    full.steps()
    assert list(full.finished) == ["one", "two"]
    assert full.all_is_over()


def test_it_runs_at_once_where_there_is_room(policy: SchedulingPolicy) -> None:
    full = where_one_failed(policy, blocks=40)
    full.end("one")
    full.steps(1)
    full.steps(1)
    assert full.computed == {"lost": 0, "one": OTHER - 1}
    full.end("two")
    full.steps()
    assert full.all_is_over()


def test_one_that_is_larger_than_the_cache_waits_as_on_stock(policy: SchedulingPolicy) -> None:
    """As one does there that nobody has received anything for: until its client leaves."""
    full = Full(policy, blocks=15)
    full.ask("lost", LOST, peer="Q")
    full.steps(1)
    full.end("lost", fail=True)
    full.ask("later", OTHER)
    full.steps()
    assert full.finished == {}
    full.scheduler.finish_requests("lost", RequestStatus.FINISHED_ABORTED)
    full.steps(1)
    full.end("later")
    full.steps()
    assert list(full.finished) == ["later"]
    assert full.all_is_over()


def test_nothing_is_kept_of_who_has_ended(policy: SchedulingPolicy) -> None:
    full = where_one_failed(policy)
    full.end("one", "two")
    full.steps()
    assert full.all_is_over()
    del full
    gc.collect()
    assert not invalid_blocks._set_back

"""K13: a finished request's blocks are free when the last transfer that uses them is over.

NIXL receives a prompt, and a connector beside it saves whatever finishes: a client that leaves in
between has both under way. The scheduler hears of each when it is over, in any order.
"""

from __future__ import annotations

import pytest
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from tests.support.decode_engine import DecodeEngine, Step
from tests.support.nixl_worker import attempt, connect, nixl_of

REMOTE = [[5, 6, 7]]


class SavingEngine(DecodeEngine):
    """A decode engine with a connector beside NIXL that saves the requests that finish.

    Attributes:
        saved: requests whose save the connector reports as over in the next step.
        again: requests that NIXL reports as received once more in the next step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.saved: set[str] = set()
        self.again: set[str] = set()
        connector = self.scheduler.connector
        for hook in ("request_finished", "request_finished_all_groups"):
            setattr(connector, hook, lambda *_: (True, None))
        connect(self.worker, "P")

    def _report(self) -> KVConnectorOutput:
        reported = super()._report()
        reported.finished_sending = self.saved or None
        reported.finished_recving = {*(reported.finished_recving or ()), *self.again} or None
        self.saved, self.again = set(), set()
        return reported

    def leave(self, req_id: str) -> None:
        self.scheduler.finish_requests(req_id, RequestStatus.FINISHED_ABORTED)

    def end_reads(self) -> None:
        nixl_of(self.worker).finish(*nixl_of(self.worker).in_flight())


def in_use(engine: SavingEngine, step: object, blocks: set[int]) -> bool | None:
    """Whether nobody else may have the blocks; None if the engine died in the step."""
    return blocks.isdisjoint(step.reusable) if isinstance(step, Step) else None


def leaving() -> tuple[SavingEngine, set[int]]:
    """An engine whose client has left while the prompt's KV was received, and the blocks."""
    engine = SavingEngine()
    engine.ask("left", range(40), REMOTE)
    engine.step()
    blocks = engine.blocks_of("left")
    engine.leave("left")
    return engine, blocks


def test_a_save_that_ends_first_does_not_free_what_is_still_written() -> None:
    engine, blocks = leaving()
    engine.saved = {"left"}
    assert in_use(engine, attempt(engine.step), blocks), "NIXL still writes into them"
    engine.end_reads()
    assert in_use(engine, attempt(engine.step), blocks) is False
    assert engine.scheduler.requests == {}


def test_a_read_that_ends_first_does_not_free_what_is_still_saved() -> None:
    engine, blocks = leaving()
    engine.end_reads()
    assert in_use(engine, attempt(engine.step), blocks), "the connector still reads them"
    engine.saved = {"left"}
    assert in_use(engine, attempt(engine.step), blocks) is False
    assert engine.scheduler.requests == {}


def test_both_may_end_in_one_step() -> None:
    engine, blocks = leaving()
    engine.saved = {"left"}
    engine.end_reads()
    assert in_use(engine, attempt(engine.step), blocks) is False
    assert engine.scheduler.requests == {}


def test_a_read_that_is_reported_twice_does_not_free_what_is_still_saved() -> None:
    engine, blocks = leaving()
    engine.end_reads()
    engine.step()
    engine.again = {"left"}
    assert in_use(engine, attempt(engine.step), blocks)
    engine.saved = {"left"}
    assert in_use(engine, attempt(engine.step), blocks) is False


@pytest.mark.parametrize("late", ["saved", "again"])
def test_a_report_for_a_request_that_is_gone_ends_no_engine(late: str) -> None:
    engine, blocks = leaving()
    engine.end_reads()
    engine.saved = {"left"}
    attempt(engine.step)
    setattr(engine, late, {"left"})
    assert in_use(engine, attempt(engine.step), blocks) is False


@pytest.mark.parametrize("early", ["saved", "again"])
def test_a_report_for_a_request_that_runs_ends_neither_it_nor_the_engine(early: str) -> None:
    engine = SavingEngine()
    engine.ask("running", range(40), max_tokens=3)
    engine.step()
    blocks = engine.blocks_of("running")
    setattr(engine, early, {"running"})
    assert in_use(engine, attempt(engine.step), blocks)
    assert "running" in engine.step().finished

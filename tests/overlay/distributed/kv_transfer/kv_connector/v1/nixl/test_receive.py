"""The receive of a request's KV: everything that can go wrong with it, in any order.

The state machine (`tests.support.receive_machine`) drives a patched worker. A checker that finds
nothing is worth something only if it finds what is there: each mutant below breaks one promise, and
the same machine has to notice.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import pytest
from vllm.v1.request import RequestStatus

from tests.support.decode_engine import DecodeEngine
from tests.support.nixl_release import NixlConnectorWorker
from tests.support.nixl_worker import (
    agent_name,
    await_handshakes,
    connect,
    lives,
    make_worker,
    nixl_of,
    raising,
    receive,
    register_peer,
    script_handshake,
    step,
)
from tests.support.receive_machine import BrokenClaimError, explore

pytest.importorskip(
    "vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.receive", reason="up to 0.29.0"
)

from vllm_overlay.distributed.kv_transfer.fix_counts import taken
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl import inbox
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl import receive as overlay
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.receive import (
    AwaitedReceives,
    FailedReceive,
    GuardedReceives,
    Receives,
    ReceivesWithReads,
    ToldReceives,
)
from vllm_overlay.logging_utils.bounded_log import LINES, BoundedLog

STEPS = 2_000


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Thousands of expected failures need not be formatted."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_the_machine_finds_nothing() -> None:
    assert explore(STEPS) >= STEPS


# ---------------------------------------------------------------- mutants


class ReportsAtOnce(ToldReceives):
    """Upstream 0.22: reports a failure while other reads are in flight."""

    def _is_over(self, req_id: str, failed: FailedReceive) -> bool:
        return True


class KeepsReading(ToldReceives):
    def _not_posted(self, req_id: str, meta: Any, error: Exception) -> None:  # noqa: ANN401
        super()._not_posted(req_id, meta, error)
        with contextlib.suppress(Exception):
            self._worker._read_blocks_for_req(req_id, meta)


class ReportsForever(ToldReceives):
    def _report(self, req_id: str, failed: FailedReceive) -> None:
        super()._report(req_id, failed)
        self._failed[req_id] = failed


class ForgetsToReport(ToldReceives):
    def _is_over(self, req_id: str, failed: FailedReceive) -> bool:
        return False


class SparesABlock(ToldReceives):
    def _blocks(self, meta: Any) -> Any:  # noqa: ANN401
        return list(super()._blocks(meta))[1:]


class FirstGroupOnly(ToldReceives):
    def _blocks(self, meta: Any) -> Any:  # noqa: ANN401
        return meta.local_block_ids[0]


class ProcessesWhatFailed(ToldReceives):
    def has_failed(self, req_id: str) -> bool:
        return super().has_failed(req_id) and False


class AwaitsTheEmpty(ToldReceives):
    def _fail_unpolled(self, req_id: str, meta: Any, handle: Any = None) -> None:  # noqa: ANN401
        self._worker._recving_metadata[req_id] = meta
        Receives._fail_unpolled(self, req_id, meta, handle)


class RemembersTheEmpty(ToldReceives):
    def start(self, req_id: str, meta: Any) -> None:  # noqa: ANN401
        self._worker._recving_metadata[req_id] = meta
        super().start(req_id, meta)


class FailsOnTheHandshakeThread(ToldReceives):
    def handshake_failed(self, req_id: str, meta: Any, error: Exception) -> None:  # noqa: ANN401
        self._fail_unpolled(req_id, meta)


class TellsEveryRank(ToldReceives):
    def _report(self, req_id: str, failed: FailedReceive) -> None:
        failed.unread |= self._agents(failed.meta).keys()
        super()._report(req_id, failed)


class TellsNobody(ToldReceives):
    def _report(self, req_id: str, failed: FailedReceive) -> None:
        failed.unread.clear()
        super()._report(req_id, failed)


class TellsOnlyWhereAReadFailed(ToldReceives):
    def _fail_unpolled(self, req_id: str, meta: Any, handle: Any = None) -> None:  # noqa: ANN401
        AwaitedReceives._fail_unpolled(self, req_id, meta, handle)


class RaisesOnRelease(ToldReceives):
    def release(self, handle: int) -> bool:
        self._worker.nixl_wrapper.release_xfer_handle(handle)
        return True


class RaisesOnTelling(ToldReceives):
    def tell(self, agent: str, notification: bytes, req_id: str) -> bool:
        self._worker.nixl_wrapper.send_notif(agent, notif_msg=notification)
        return True


class ReadsAnyNotification(ToldReceives):
    def notifications(self) -> Any:  # noqa: ANN401
        return inbox.notifications(self._worker, b"")  # all is somebody else's


class DropsNotifications(ToldReceives):
    def notifications(self) -> Any:  # noqa: ANN401
        return [sent for sent in super().notifications() if len(sent) == 1]


class NeverReleases(ToldReceives):
    def release(self, handle: int) -> bool:
        return True


class ReportsWhatMayStillWrite(ToldReceives):
    pop_ended = AwaitedReceives.pop_ended


class ReleasesOnce(ToldReceives):
    def _release_again(self) -> None:
        pass


MUTANTS = [
    ReportsAtOnce, KeepsReading, ReportsForever, ForgetsToReport, SparesABlock, FirstGroupOnly,
    ProcessesWhatFailed, AwaitsTheEmpty, RemembersTheEmpty, FailsOnTheHandshakeThread,
    TellsEveryRank, TellsNobody, TellsOnlyWhereAReadFailed, RaisesOnRelease, RaisesOnTelling,
    NeverReleases, ReportsWhatMayStillWrite, ReleasesOnce,
]  # fmt: skip
if not hasattr(NixlConnectorWorker, "_cleanup_remote_engine"):  # from 0.24.0 on the worker reads
    MUTANTS += [ReadsAnyNotification, DropsNotifications]


def with_receives(
    receives: Callable[[NixlConnectorWorker], object],
) -> Callable[[NixlConnectorWorker], None]:
    def prepare(worker: NixlConnectorWorker) -> None:
        vars(worker)["_receives"] = receives(worker)

    return prepare


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_machine_finds_a_mutant(mutant: type[ToldReceives]) -> None:
    with pytest.raises(BrokenClaimError):  # which ends it, mostly long before
        explore(10 * STEPS, prepare=with_receives(mutant), shrink=False)


# ---------------------------------------------------------------- single cases


def break_off(engine_id: str, tp_size: int) -> dict[int, str]:
    raise RuntimeError("timed out")


def test_receives_are_made_once_for_each_worker_and_for_no_class() -> None:
    one, other = make_worker(), make_worker()
    assert one._receives is one._receives
    assert one._receives is not other._receives
    assert mock.create_autospec(type(one))  # looks at all that a class has


@pytest.mark.parametrize("groups", [("full",), ("full", "sliding")])
def test_a_receive_without_blocks_leaves_nothing_behind(groups: Any) -> None:  # noqa: ANN401
    worker = make_worker(groups=groups)
    connect(worker, "P")

    def handshake(engine_id: str, tp_size: int) -> dict[int, str]:
        if engine_id == "Q":
            raise RuntimeError("timed out")
        return register_peer(worker, engine_id, tp_size)

    script_handshake(worker, handshake)
    for req_id, engine_id in ("a", "P"), ("b", "Q"), ("c", "R"):
        remote = [[5] for _ in groups]
        receive(worker, req_id, local_blocks=[], remote_blocks=remote, engine_id=engine_id)
    end = time.monotonic() + 10
    while not worker.xfer_stats.data["num_failed_notifications"] or len(nixl_of(worker).heard) < 2:
        assert time.monotonic() < end
        await_handshakes(worker)
        assert lives(step, worker) == (set(), set())
    assert worker._recving_metadata == {}
    assert nixl_of(worker).heard[agent_name("P", 0)] == [b"req-p:1"]
    assert nixl_of(worker).heard[agent_name("R", 0)] == [b"req-p:1"]
    # What could not be told is counted.
    assert worker.xfer_stats.data["num_failed_notifications"] == [1]


def test_a_receive_without_blocks_is_not_mistaken_for_a_failing_one_of_the_same_id() -> None:
    worker = make_worker()
    connect(worker, "P")
    receive(worker, "a", local_blocks=[[1, 2, 3]], remote_blocks=[[5]], remote_request_id="one")
    receive(worker, "a", local_blocks=[], remote_request_id="other")
    assert nixl_of(worker).heard[agent_name("P", 0)] == [b"other:1"]
    assert lives(step, worker)[1] == {"a"}
    assert nixl_of(worker).heard[agent_name("P", 0)] == [b"other:1", b"one:1"]


def test_invalid_blocks_can_be_asked_for_before_the_finished_receives() -> None:
    worker = make_worker()
    script_handshake(worker, break_off)
    receive(worker, "a", local_blocks=[[1, 2]])
    await_handshakes(worker)
    assert worker.get_block_ids_with_load_errors() == {1, 2}
    assert worker.get_finished()[1] == {"a"}
    assert worker.get_block_ids_with_load_errors() == set()


def test_a_failed_handshake_crosses_even_if_it_cannot_be_logged() -> None:
    worker = make_worker()
    script_handshake(worker, break_off)
    with mock.patch.object(worker, "_log_failure", raising(ValueError("no such field"))):
        receive(worker, "a")
        await_handshakes(worker)
    assert lives(step, worker)[1] == {"a"}


@pytest.mark.parametrize("p_tp", [1, 2, 4])
def test_p_hears_of_a_failed_read_what_it_hears_of_others(p_tp: int) -> None:
    worker = make_worker(tp_size=2, tp_rank=1)
    connect(worker, "P", tp_size=p_tp)
    receive(worker, tp_size=p_tp)
    nixl = nixl_of(worker)
    nixl.fail(*nixl.reads)
    step(worker)
    said = {read.agent: [read.notif] for read in nixl.reads}
    assert {agent: words for agent, words in nixl.heard.items() if words} == said
    assert taken() == {"RECEIVE_FAILED": 1, "UNREAD_TOLD": 1}


def test_a_p_that_cannot_be_told_has_not_been() -> None:
    worker = make_worker()
    connect(worker, "P")
    receive(worker)
    nixl = nixl_of(worker)
    nixl.on["send_notif"] = raising(RuntimeError("gone"))
    nixl.fail(*nixl.reads)
    step(worker)
    assert taken() == {"RECEIVE_FAILED": 1}


def test_all_ranks_that_share_a_latent_cache_are_told_once_when_nothing_can_be_read() -> None:
    worker = make_worker(mla=True)
    connect(worker, "P", tp_size=4)
    receive(worker, local_blocks=[[1, 2, 3]], remote_blocks=[[5]], tp_size=4)
    step(worker)
    step(worker)
    heard = nixl_of(worker).heard
    assert [heard[agent_name("P", rank)] for rank in range(4)] == [[b"req-p:1"]] * 4


def test_a_rank_that_is_skipped_and_cannot_be_told_does_not_spoil_what_is_read() -> None:
    worker = make_worker(mla=True)
    connect(worker, "P", tp_size=4)
    nixl = nixl_of(worker)
    nixl.on["send_notif"] = raising(RuntimeError("gone"), lambda agent, _: agent.endswith("1"))
    lives(receive, worker, tp_size=4)
    nixl.finish(*nixl.reads)
    assert lives(step, worker)[1] == {"req-d"}
    assert worker.get_block_ids_with_load_errors() == set()
    assert nixl.heard[agent_name("P", 3)] == [b"req-p:1"]
    assert worker.xfer_stats.data["num_failed_notifications"] == [1]


def test_an_id_that_is_no_text_fails_only_its_request() -> None:
    worker = make_worker()
    connect(worker, "P")
    lives(receive, worker, "a", local_blocks=[[1, 2]], remote_request_id="half a pair: \ud800")
    assert lives(step, worker)[1] == {"a"}
    assert worker.get_block_ids_with_load_errors() == {1, 2}


FAILURE_TYPES = {
    "make_prepped_xfer": "transfer_setup_failed",
    "transfer": "transfer_setup_failed",
    "check_xfer_state": "transfer_exception",
    "get_xfer_telemetry": "telemetry_failed",
    "release_xfer_handle": "handle_release_failed",
    "get_new_notifs": "notification_poll_failed",
}


@pytest.mark.parametrize("call", FAILURE_TYPES)
def test_the_log_line_says_what_failed(call: str) -> None:
    worker = make_worker()
    connect(worker, "P")
    nixl = nixl_of(worker)
    nixl.on[call] = raising(RuntimeError(call))
    with mock.patch.object(worker, "_log_failure") as log:
        receive(worker)
        nixl.finish(*nixl.in_flight())
        step(worker)
    assert [entry.kwargs["failure_type"] for entry in log.call_args_list] == [FAILURE_TYPES[call]]
    assert not worker.xfer_stats.is_empty()


def test_receives_that_fail_do_not_fill_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    logging.disable(logging.NOTSET)
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(overlay, "failures", BoundedLog(logging.getLogger("receives")))
    worker = make_worker()
    worker._nixl_handshake = raising(ConnectionError("gone"))
    for number in range(2 * LINES):
        receive(worker, f"r-{number}")
        await_handshakes(worker)
        assert lives(step, worker)[1] == {f"r-{number}"}
    assert caplog.text.count("as failed to receive") == LINES
    assert "Reporting request r-0 as failed" in caplog.text
    assert taken() == {"RECEIVE_FAILED": 2 * LINES}


@pytest.mark.parametrize("blocks", [[], [[1, 2]]], ids=["prefix hit", "read"])
def test_a_receive_waits_for_the_agents_of_a_handshake_that_has_just_ended(blocks: Any) -> None:  # noqa: ANN401
    worker = make_worker(mla=True)
    go = threading.Event()

    def handshake(engine_id: str, tp_size: int) -> dict[int, str]:
        go.wait(10)
        return register_peer(worker, engine_id, tp_size)

    script_handshake(worker, handshake)
    receive(worker, "a", local_blocks=[[3, 4]], remote_request_id="a-at-p", tp_size=2)
    with worker._handshake_lock:  # as while the main thread asks for receives
        go.set()
        worker._handshake_futures["P"].result(10)
        lives(receive, worker, "b", local_blocks=blocks, remote_request_id="b-at-p", tp_size=2)
        assert "P" not in worker._remote_agents  # nor does it look connected
    await_handshakes(worker)
    lives(step, worker)
    nixl = nixl_of(worker)
    nixl.finish(*nixl.reads)
    assert lives(step, worker)[1] == {"a", "b"} if blocks else {"a"}
    assert worker.get_block_ids_with_load_errors() == set()
    for rank in range(2):
        assert sorted(nixl.heard[agent_name("P", rank)]) == [b"a-at-p:1", b"b-at-p:1"]


REFUSED = RuntimeError("NIXL_ERR_REPOST_ACTIVE")


def test_a_handle_that_nixl_keeps_is_logged_and_counted_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    logging.disable(logging.NOTSET)
    clock = [0.0]
    monkeypatch.setattr(overlay, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    worker = make_worker()
    connect(worker, "P")
    receive(worker)
    nixl = nixl_of(worker)
    nixl.on["release_xfer_handle"] = raising(REFUSED)
    nixl.fail(*nixl.reads)
    caplog.clear()
    with caplog.at_level(logging.INFO, "vllm"):
        for _ in range(100):
            assert lives(step, worker) == (set(), set())
        assert caplog.text.count("failure: transfer_failed") == 1
        assert caplog.text.count("failure: handle_release_failed") == 1
        assert len(caplog.records) == 2
        clock[0] += overlay.REMINDER_SECONDS
        for _ in range(2):
            step(worker)
        assert "req-d" in caplog.records[-1].getMessage()
        assert len(caplog.records) == 3
    assert len(worker.xfer_stats.data["num_failed_transfers"]) == 2  # the read and its handle
    assert len(nixl.called("check_xfer_state")) == 1  # it is not asked again
    assert nixl.heard[agent_name("P", 0)] == []
    del nixl.on["release_xfer_handle"]
    clock[0] += overlay.REMINDER_SECONDS
    assert lives(step, worker)[1] == {"req-d"}
    assert caplog.text.count("still does not release") == 1


def test_a_shutdown_tries_a_handle_that_nixl_keeps_once_more() -> None:
    worker = make_worker()
    connect(worker, "P")
    receive(worker)
    receive(worker, "in flight")
    nixl = nixl_of(worker)
    nixl.on["release_xfer_handle"] = raising(REFUSED)
    nixl.fail(nixl.reads[0])
    step(worker)
    del nixl.on["release_xfer_handle"]
    for _ in range(2):
        worker.shutdown()
    assert [read.released for read in nixl.reads] == [True, True]
    assert nixl.misuse == []
    assert nixl.called("deregister_memory")


# ---------------------------------------------------------------- in an engine


@pytest.mark.parametrize("aborted", [False, True], ids=["waits", "aborted"])
@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("ends", ["ERR", "raises", "not posted"])
def test_no_block_is_reusable_while_nixl_does_not_release_a_failed_read(
    policy: Literal["recompute", "fail"], ends: str, aborted: bool
) -> None:
    engine = DecodeEngine(policy=policy)
    connect(engine.worker, "P")
    nixl = nixl_of(engine.worker)
    nixl.on["release_xfer_handle"] = raising(REFUSED)
    if ends == "not posted":
        nixl.on["transfer"] = raising(REFUSED)
    else:
        nixl.on["check_xfer_state"] = raising(REFUSED) if ends == "raises" else lambda _: "ERR"
    engine.ask("a", range(40), [[5, 6, 7]])
    engine.step()
    blocks = engine.blocks_of("a")
    if aborted:
        engine.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    for _ in range(3):
        step = engine.step()
        assert not step.computed
        assert step.reusable.isdisjoint(blocks)
    assert nixl.heard[agent_name("P", 0)] == []
    del nixl.on["release_xfer_handle"]
    steps = [engine.step() for _ in range(3)]
    assert engine.scheduler.requests == {}
    assert steps[-1].reusable >= blocks
    computed = [s.computed["a"] for s in steps if s.computed][:1]
    assert computed == ([(0, 40)] if policy == "recompute" and not aborted else [])
    assert nixl.heard[agent_name("P", 0)] == ([b"a-at-p:1"] if policy == "recompute" else [])
    assert nixl.misuse == []


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_no_block_is_reusable_while_a_read_may_write_into_it(
    policy: Literal["recompute", "fail"],
) -> None:
    engine = DecodeEngine(policy=policy)
    connect(engine.worker, "P", tp_size=2)
    nixl = nixl_of(engine.worker)
    nixl.on["transfer"] = raising(
        RuntimeError("no route"), lambda _: nixl.reads[-1].agent == agent_name("P", 1)
    )
    engine.ask("a", range(40), [[5, 6, 7]], tp_size=2)
    engine.step()
    [in_flight] = nixl.in_flight()
    blocks = engine.blocks_of("a")
    for _ in range(3):
        step = engine.step()
        assert not step.computed
        assert step.reusable.isdisjoint(blocks)
    nixl.finish(in_flight)
    steps = [engine.step() for _ in range(3)]
    assert engine.scheduler.requests == {}
    assert steps[-1].reusable >= blocks
    computed = [s.computed["a"] for s in steps if s.computed][:1]
    assert computed == ([(0, 40)] if policy == "recompute" else [])


def test_a_request_that_is_aborted_while_its_read_fails_is_freed_after_the_read() -> None:
    engine = DecodeEngine()
    connect(engine.worker, "P")
    nixl = nixl_of(engine.worker)
    engine.ask("a", range(40), [[5, 6, 7]])
    engine.step()
    blocks = engine.blocks_of("a")
    engine.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert engine.step().reusable.isdisjoint(blocks)
    nixl.fail(*nixl.in_flight())
    assert engine.step().reusable >= blocks
    assert engine.scheduler.requests == {}
    assert nixl.heard[agent_name("P", 0)] == [b"a-at-p:1"]


def test_a_request_that_is_aborted_before_its_handshake_fails_does_not_end_the_engine() -> None:
    engine = DecodeEngine()
    script_handshake(engine.worker, break_off)
    engine.ask("a", range(40), [[5, 6, 7]])
    engine.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    engine.ask("b", range(100, 120))
    engine.step()
    await_handshakes(engine.worker)
    finished = [engine.step().finished for _ in range(3)]
    assert {"b": "length"} in finished
    assert engine.scheduler.requests == {}


def test_a_prompt_that_is_here_already_survives_that_p_cannot_be_told() -> None:
    engine = DecodeEngine()
    script_handshake(engine.worker, break_off)
    engine.ask("a", range(32))
    while engine.scheduler.requests:
        engine.step()
    engine.ask("b", range(33), [[5, 6, 7]])
    steps = [engine.step()]
    await_handshakes(engine.worker)
    steps += [engine.step() for _ in range(3)]
    assert {"b": "length"} in [s.finished for s in steps]


def test_peers_that_connect_do_not_disturb_those_that_cannot() -> None:
    engine = DecodeEngine()

    def some(engine_id: str, tp_size: int) -> dict[int, str]:
        if engine_id == "Q":
            raise RuntimeError("compatibility hash mismatch")
        return register_peer(engine.worker, engine_id, tp_size)

    script_handshake(engine.worker, some)
    engine.ask("good", range(40), [[5, 6, 7]], engine_id="P")
    engine.ask("lost", range(100, 140), [[5, 6, 7]], engine_id="Q")
    steps = [engine.step()]
    await_handshakes(engine.worker)
    steps.append(engine.step())
    nixl_of(engine.worker).finish(*nixl_of(engine.worker).in_flight())
    steps += [engine.step() for _ in range(4)]
    first: dict[str, tuple[int, int]] = {}
    for one in steps:
        first = one.computed | first
    assert first == {"good": (39, 40), "lost": (0, 40)}
    assert engine.scheduler.requests == {}


# ---------------------------------------------------------------- counts, and what is remembered


def test_a_read_that_failed_is_counted_once() -> None:
    worker = make_worker()
    connect(worker)
    lives(receive, worker)
    nixl_of(worker).fail(*nixl_of(worker).reads)
    for _ in range(3):
        lives(step, worker)
    assert sum(worker.xfer_stats.data["num_failed_transfers"]) == 1


def test_a_receive_that_only_tells_p_is_not_remembered() -> None:
    """Nobody awaits it, so nothing would ever forget it."""
    worker = make_worker()
    connect(worker)
    lives(receive, worker, local_blocks=[])
    assert nixl_of(worker).heard == {agent_name("P", 0): [b"req-p:1"]}
    assert not worker._recving_metadata


def test_nothing_is_remembered_of_a_read_that_is_done() -> None:
    """NIXL may give the number of its handle to another."""
    worker = make_worker()
    connect(worker)
    lives(receive, worker)
    worker._receives.told("req-d", "a rank that has nothing for us")
    nixl_of(worker).finish(*nixl_of(worker).reads)
    assert lives(step, worker)[1] == {"req-d"}
    kept = vars(worker._receives).items()
    assert {name: value for name, value in kept if isinstance(value, dict) and value} == {}


def test_a_read_of_which_nobody_knows_what_it_was_for_fails_alone() -> None:
    worker = make_worker()
    connect(worker)
    lives(receive, worker)
    worker._receives.read_posted(99, "a rank")
    worker._receives.fail("unknown", 99)
    nixl_of(worker).finish(*nixl_of(worker).reads)
    assert lives(step, worker)[1] == {"req-d"}
    assert worker.get_block_ids_with_load_errors() == set()


# ---------------------------------------------------------------- with some of the fixes only


def bare_worker(**more: Any) -> Any:  # noqa: ANN401 - a stand-in
    """What receives look at in a worker that has two reads of a request with two groups."""
    remote = SimpleNamespace(engine_id="P", request_id="a-at-p")
    return SimpleNamespace(
        _recving_metadata={"a": SimpleNamespace(local_block_ids=[[1, 2], [3]], remote=remote)},
        _recving_transfers={"a": [7, 8]},
        _invalid_block_ids=set(),
        _is_hma_required=False,
        _log_failure=mock.Mock(),
        _remote_agents={"P": {0: "P/0", 1: "P/1"}},
        kv_transfer_config=SimpleNamespace(kv_load_failure_policy="recompute"),
        world_size=1,
        _pop_done_transfers=lambda reads: set(),
        nixl_wrapper=mock.Mock(),
        xfer_stats=mock.Mock(),
        **more,
    )


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize(("handle", "over"), [(7, set()), (9, {"a"}), (None, {"a"})])
def test_the_first_fix_reports_what_polling_does_not_find(
    handle: int | None, over: set[str], hybrid: bool
) -> None:
    worker = bare_worker()
    worker._is_hma_required = hybrid
    receives = Receives(worker)
    receives.fail("a", handle)
    released = worker.nixl_wrapper.release_xfer_handle.call_args_list
    assert released == [mock.call(handle)] * (handle is not None)
    assert worker._invalid_block_ids == (set() if hybrid else {1, 2})
    assert receives.pop_ended() == over
    receives.fail("a", None)
    assert receives.pop_ended(lambda reads: {"b"}) == {"a", "b"}


@pytest.mark.parametrize("refused", [False, True])
def test_up_to_k09_what_is_not_posted_fails_its_request_and_says_why_once(refused: bool) -> None:
    """A read that NIXL refuses is logged before; here it does not take the handle back either."""
    worker = bare_worker()
    worker._recving_transfers.clear()
    worker.nixl_wrapper.release_xfer_handle.side_effect = REFUSED
    receives = ReceivesWithReads(worker)
    worker._handle_failed_transfer = receives.fail
    error = REFUSED if refused else ValueError("what P says makes no sense")
    raises = raising(error)
    worker._read_blocks_for_req = lambda *_: receives.read_refused(9) if refused else raises()
    receives.start("a", worker._recving_metadata["a"])
    said = [call.kwargs for call in worker._log_failure.call_args_list]
    assert [(one["req_id"], one["error"]) for one in said] == [("a", error)]
    assert receives.pop_ended() == {"a"}


def told(receives: ToldReceives, worker: Any) -> list[str]:  # noqa: ANN401 - a stand-in
    """The ranks of P that are told when the request is reported."""
    assert receives.pop_failed({"a"}) == {"a"}
    return [call.args[0] for call in worker.nixl_wrapper.send_notif.call_args_list]


def test_up_to_k12_a_receive_that_only_tells_p_is_counted_and_changes_no_other() -> None:
    worker = bare_worker()
    receives = ToldReceives(worker)
    receives.fail("a", None)
    only_tells = SimpleNamespace(local_block_ids=[], remote=worker._recving_metadata["a"].remote)
    receives.handshake_failed("a", only_tells, REFUSED)
    receives.invalidate_unconnected()
    worker.xfer_stats.record_failed_notification.assert_called_once_with()
    assert told(receives, worker) == []


@pytest.mark.parametrize("taken", [True, False])
def test_what_nixl_does_not_send_is_said_and_counted(taken: bool) -> None:
    worker = bare_worker()
    worker.nixl_wrapper.send_notif.side_effect = None if taken else REFUSED
    assert ToldReceives(worker).tell("P/0", b"a:1", "a") is taken
    worker.nixl_wrapper.send_notif.assert_called_once_with("P/0", notif_msg=b"a:1")
    assert worker.xfer_stats.record_failed_notification.call_count == (not taken)
    assert worker._log_failure.call_count == (not taken)


def test_a_rank_that_has_nothing_for_us_is_not_told_again() -> None:
    worker = bare_worker()
    worker._recving_transfers.clear()
    receives = ToldReceives(worker)
    worker._handle_failed_transfer = receives.fail

    def read(*_: object) -> None:
        receives.told("a", 0)
        receives.read_refused(None)

    worker._read_blocks_for_req = read
    receives.start("a", worker._recving_metadata["a"])
    assert told(receives, worker) == ["P/1"]


def test_up_to_0_23_0_a_receive_starts_when_the_agents_of_its_peer_are_there() -> None:
    begun: list[tuple[object, object]] = []
    worker = bare_worker(_ready_requests=queue.Queue())
    worker._read_blocks_for_req = lambda *asked: begun.append(asked)
    p, q = (
        SimpleNamespace(remote=SimpleNamespace(engine_id=one), local_block_ids=[]) for one in "PQ"
    )
    for asked in ("p", p), ("q", q):
        worker._ready_requests.put(asked)
    Receives(worker).start_ready()
    assert begun == [("p", p)]
    assert list(worker._ready_requests.queue) == [("q", q)]


def test_up_to_0_23_0_who_has_ranks_that_do_not_fit_ours_is_not_heard() -> None:
    fits = raising(ValueError("3 ranks"), lambda ranks: ranks == 3)
    worker = bare_worker(transfer_topo=SimpleNamespace(tp_ratio=fits))
    worker.nixl_wrapper.get_new_notifs.return_value = {"D": [b"a:1", b"b:3"]}
    assert GuardedReceives(worker).notifications() == [[b"a:1"]]

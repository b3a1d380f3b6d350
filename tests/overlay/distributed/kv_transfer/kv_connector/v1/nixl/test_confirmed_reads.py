"""Which reads are used, which are not, and that nobody waits who need not."""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from tests.support.decode_engine import Step
from tests.support.lease_pair import (
    PrefillServer,
    Server,
    computed_of,
    decode_server,
    prefill_server,
)
from tests.support.nixl_worker import (
    await_handshakes,
    connect,
    nixl_of,
    register_peer,
    script_handshake,
)
from tests.support.two_way import TWO_WAY, two_way
from vllm_overlay.distributed.kv_transfer.fix_counts import taken
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl import (
    confirmed_reads as module,
)
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl import lease_book, read_check
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.confirmed_reads import (
    FIELD,
    ConfirmedReads,
    announces_lease,
    asks_about_lease,
    confirmed_reads,
    lease_ended,
)
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.connector import (
    WakesIdleEngine,
    WorkerReport,
)
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.lease_book import Answer, Standing
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.lease_questions import (
    Peer,
    Question,
    Reply,
)
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.unseen_ends import LONG
from vllm_overlay.logging_utils.bounded_log import BoundedLog

PROMPT = list(range(40))
OFFER = {"remote_host": "127.0.0.1", "remote_port": 1, "remote_engine_id": "P"}


@pytest.fixture
def p() -> Iterator[PrefillServer]:
    """P, which keeps what nobody reads for as long as any test takes."""
    with prefill_server(lease=100.0) as server:
        yield server


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Question]:
    """The questions of all decode servers."""
    from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl import lease_questions

    questions: list[Question] = []
    ask = lease_questions.LeaseQuestions.ask

    def noting(self: Any, peer: Any, question: Question) -> None:  # noqa: ANN401
        questions.append(question)
        ask(self, peer, question)

    monkeypatch.setattr(lease_questions.LeaseQuestions, "ask", noting)
    return questions


def begin(d: Server, offer: dict[str, Any], req_id: str = "r") -> None:
    d.send(req_id, PROMPT, offer)
    d.step()
    d.step()


def end(d: Server, seconds: float = 5.0) -> list[Step]:
    """Let the reads end, and step until all requests have, or for so long."""
    nixl = nixl_of(d.worker)
    nixl.finish(*nixl.in_flight())
    steps, over = [], time.monotonic() + seconds
    while d.scheduler.has_requests() and time.monotonic() < over:
        steps.append(d.step())
        time.sleep(0.001)
    return steps


def used(steps: list[Step], req_id: str = "r") -> bool:
    """Whether the request has ended, with what was read."""
    assert any(req_id in step.finished for step in steps), "it does not end"
    return computed_of(steps, req_id) < len(PROMPT)


def test_a_read_in_time_is_used_and_asked_for_once(p: PrefillServer, asked: list[Question]) -> None:
    d = decode_server()
    begin(d, p.prefill("at-p", PROMPT))
    assert used(end(d))
    assert len(asked) == 1
    assert "READ_REFUSED" not in taken()


def test_a_late_read_is_used_if_the_blocks_are_held(
    p: PrefillServer, asked: list[Question], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_book, "PROMISE", 0.0)
    d = decode_server()
    begin(d, p.prefill("at-p", PROMPT))
    assert used(end(d))
    assert len(asked) == 2
    assert asked[1].agents == {"D/0"}


def test_while_a_question_is_not_answered_no_other_goes(
    p: PrefillServer, asked: list[Question]
) -> None:
    offer, d = p.prefill("at-p", PROMPT), decode_server()
    p.leave_unanswered()
    begin(d, offer)
    [read] = confirmed_reads(d.part)._reads.values()  # type: ignore[union-attr]
    read.check.hears(asked[0].asked, Answer(Standing.HELD, 0.0))
    steps = end(d, 0.1)
    assert len(asked) == 2
    p.answer_again()
    assert used(steps + end(d))


def test_a_late_read_is_used_if_p_has_heard_of_it_and_of_nobody_else(
    p: PrefillServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_book, "PROMISE", 0.0)
    d = decode_server()
    begin(d, p.prefill("at-p", PROMPT), "late")
    nixl = nixl_of(d.worker)
    nixl.finish(*nixl.in_flight())
    p.hears_of(d)
    assert "at-p" not in p.scheduler.requests
    assert used(end(d), "late")


def test_what_another_reader_has_freed_stays_while_it_is_promised(
    p: PrefillServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer = p.prefill("at-p", PROMPT)
    first, second = decode_server("first/0"), decode_server("second/0")
    book = confirmed_reads(p.part).book  # type: ignore[union-attr]
    assert book.answer(offer[FIELD], "first", frozenset({"first/0"})).seconds > 9
    begin(second, offer, "second")
    steps = end(second, 0.05)
    p.hears_of(second)
    p.step()
    assert "at-p" in p.scheduler.requests
    assert used(steps + end(second), "second")
    later = time.perf_counter() + lease_book.PROMISE
    monkeypatch.setattr(book, "_clock", lambda: later)
    p.step()
    assert "at-p" not in p.scheduler.requests
    begin(first, offer, "first")
    assert not used(end(first), "first")


def test_of_an_engine_that_has_not_said_who_it_is_blocks_are_free_when_it_has(
    p: PrefillServer, asked: list[Question]
) -> None:
    """D's workers say who they are in its first step; its first questions come before."""
    d = Server("D/0")
    connect(d.worker, "P")
    d.send("s", [7, *PROMPT], p.prefill("other", [7, *PROMPT]))
    begin(d, p.prefill("at-p", PROMPT))
    steps = end(d)
    assert used(steps) and used(steps, "s")
    assert len(asked) == 2
    p.hears_of(d)
    over = time.monotonic() + 5
    while p.scheduler.requests and time.monotonic() < over:
        time.sleep(0.001)
        p.step()
    assert not p.scheduler.requests


def test_the_answer_to_such_a_first_question_is_one(
    p: PrefillServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_book, "PROMISE", 0.0)
    monkeypatch.setattr(read_check, "AGAIN", 100.0)
    d = Server("D/0")
    connect(d.worker, "P")
    begin(d, p.prefill("at-p", PROMPT))
    assert used(end(d))


def test_blocks_are_free_as_soon_as_their_reader_is_heard(p: PrefillServer) -> None:
    """As on stock: a promise keeps nothing from being freed that is read."""
    d = decode_server()
    begin(d, p.prefill("at-p", PROMPT))
    assert used(end(d))
    p.hears_of(d)
    assert "at-p" not in p.scheduler.requests


def test_a_read_may_be_heard_of_before_it_is_asked_for(p: PrefillServer) -> None:
    """The question is slower than the read and its notification."""
    d = decode_server()
    offer = p.prefill("at-p", PROMPT)
    p.leave_unanswered()
    begin(d, offer, "overtaken")
    nixl = nixl_of(d.worker)
    nixl.finish(*nixl.in_flight())
    p.hears_of(d)
    p.answer_again()
    assert used(end(d), "overtaken")


def test_what_is_read_from_a_p_that_has_never_answered_is_used_as_on_stock(
    p: PrefillServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """D's scheduler cannot reach it, and its workers can. The first read waits for an answer."""
    monkeypatch.setattr(read_check, "PATIENCE", 0.3)
    monkeypatch.setattr(module, "unconfirmed", BoundedLog(module.logger))
    offers = [p.prefill(f"at-p-{n}", [n, *PROMPT]) for n in range(3)]
    p.leave_unanswered()
    d = decode_server()
    begin(d, offers[0], "0")
    assert not any(step.finished for step in end(d, 0.1)), "it may still answer"
    assert used(end(d), "0")
    begin(d, offers[1], "1")
    assert used(end(d, 0.1), "1"), "at once"
    where = f"127.0.0.1:{offers[0]['remote_port']}"
    said = f"Reads from engine at {where} are unconfirmed: it has answered no question."
    assert caplog.text.count(said) == 1
    assert taken() == {"PEER_UNCONFIRMED": 1}
    reads = confirmed_reads(d.part)
    assert reads is not None
    assert [*reads._answers.values()] == [False]
    p.answer_again()  # what was asked meanwhile, about reads that are forgotten
    begin(d, offers[2], "2")
    for _ in range(500):
        d.step()
        if True in reads._answers.values():
            break
        time.sleep(0.01)
    assert used(end(d), "2")
    assert [*reads._answers.values()] == [True]


def test_an_answer_that_comes_too_late_for_its_read_counts_for_the_next() -> None:
    reads = ConfirmedReads(1)
    reads.agents.add("D/0")
    peer = Peer("127.0.0.1", 1)
    reads._use_unheard(SimpleNamespace(reader="late", peer=peer))  # type: ignore[arg-type]
    held = Answer(Standing.HELD, 1.0)
    replies = [Reply("unknown", 0.0, held), Reply("late", 0.0, held)]
    reads.questions.replies = lambda: iter(replies)  # type: ignore[method-assign]
    reads._take_replies()
    assert reads._answers == {peer: True}
    assert reads._unheard == {}


def test_of_peers_the_last_ones_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_NAMED", 2)
    reads = ConfirmedReads(1)
    for port in (1, 2, 1, 3):
        read: Any = SimpleNamespace(reader=str(port), peer=Peer("127.0.0.1", port))
        reads._use_unheard(read)
    assert [peer.port for peer in reads._answers] == [1, 3]
    assert len(reads._unheard) == 2


def test_what_p_has_answered_about_is_not_used_because_it_is_silent_then(
    p: PrefillServer, asked: list[Question], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even if that it did is forgotten."""
    monkeypatch.setattr(read_check, "PATIENCE", 0.1)
    offer, d = p.prefill("at-p", PROMPT), decode_server()
    p.leave_unanswered()
    begin(d, offer)
    reads = confirmed_reads(d.part)
    assert reads is not None
    reads._reads["r"].check.hears(asked[0].asked, Answer(Standing.HELD, 0.0))
    assert not used(end(d))
    assert taken() == {"READ_REFUSED": 1}


def test_a_silent_p_has_not_confirmed(
    p: PrefillServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    offer, other = p.prefill("at-p", PROMPT), p.prefill("other", [7, *PROMPT])
    d = decode_server()
    d.send("first", [8, *PROMPT], p.prefill("first", [8, *PROMPT]))
    d.step()
    assert used(end(d), "first")
    monkeypatch.setattr(read_check, "PATIENCE", 0.1)
    p.leave()
    d.send("s", [7, *PROMPT], other)
    begin(d, offer)
    steps = end(d)
    assert not used(steps) and not used(steps, "s")
    where = f"127.0.0.1:{offer['remote_port']}"
    assert (
        f"Request r does not use the KV that it has read: the prefill server at {where} does not "
        in caplog.text
    )
    assert taken() == {"READ_REFUSED": 2}


def test_a_read_that_has_failed_waits_for_no_answer(p: PrefillServer) -> None:
    offer = p.prefill("at-p", PROMPT)
    p.leave()
    d = decode_server()
    begin(d, offer)
    nixl = nixl_of(d.worker)
    nixl.fail(*nixl.in_flight())
    assert not used(end(d, seconds=2.0))


def test_a_request_that_has_left_waits_for_no_answer(p: PrefillServer) -> None:
    offer = p.prefill("at-p", PROMPT)
    p.leave()
    d = decode_server()
    free = d.step().reusable
    begin(d, offer)
    d.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
    end(d, seconds=0.2)
    assert d.step().reusable == free
    assert d.scheduler.requests == {}


def test_the_blocks_of_an_aborted_read_are_kept_until_it_is_over(p: PrefillServer) -> None:
    d = decode_server()
    free = d.step().reusable
    begin(d, p.prefill("at-p", PROMPT))
    d.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
    for _ in range(3):
        assert d.step().reusable < free
    end(d)
    assert d.step().reusable == free


def test_an_unconfirmed_peer_is_named_once_and_all_is_as_on_stock(
    p: PrefillServer,
    asked: list[Question],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "unconfirmed", BoundedLog(module.logger))
    offer = p.prefill("at-p", PROMPT)
    del offer["remote_lease"]  # its name on the wire, which other builds know too
    d = decode_server()
    begin(d, offer)
    assert used(end(d))
    begin(d, offer | {"remote_request_id": "other"}, "other")
    end(d)
    assert asked == []
    assert caplog.text.count("are unconfirmed") == 1
    assert f"engine {offer['remote_engine_id']} are unconfirmed: its kv_transfer" in caplog.text


def test_without_reports_of_workers_all_is_as_on_stock(
    p: PrefillServer,
    asked: list[Question],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Up to 0.19.1 vLLM's second model runner makes none."""
    monkeypatch.setattr(module, "unconfirmed", BoundedLog(module.logger))
    offer = p.prefill("at-p", PROMPT)
    monkeypatch.setattr(WakesIdleEngine, "build_connector_worker_meta", lambda _: None)
    d = Server("D/0")
    connect(d.worker, "P")
    begin(d, offer)
    assert used(end(d))
    assert asked == []
    assert "are unconfirmed: not all workers of this one report" in caplog.text
    reads = confirmed_reads(d.part)
    assert reads is not None
    assert not reads._reads
    assert not reads._readers
    assert not reads._unsigned


def test_a_p_whose_workers_make_no_report_announces_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(WakesIdleEngine, "build_connector_worker_meta", lambda _: None)
    with prefill_server(lease=100.0) as mute:
        assert FIELD not in mute.prefill("at-p", PROMPT)


def test_a_scheduler_that_settles_nothing_fills_no_table(
    p: PrefillServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a plugin's with an `update_from_output` of its own. Its reads are used as on stock."""
    monkeypatch.setattr(module, "MAX_UNSIGNED", 2)
    d = decode_server()
    reads = confirmed_reads(d.part)
    assert reads is not None
    reads.agents.clear()  # it has settled the first step
    monkeypatch.setattr(reads, "settle", lambda _, output: output)
    for i in range(4):
        offer = p.prefill(f"at-p-{i}", [i, *PROMPT])
        d.send(f"r{i}", [i, *PROMPT], offer)
        d.step()
    assert used(end(d), "r3")
    assert list(reads._reads) == ["r2", "r3"], "the last"
    assert len(reads._readers) == len(reads._unsigned) == 2


def test_with_a_worker_that_is_never_heard_all_is_as_on_stock(
    p: PrefillServer, asked: list[Question]
) -> None:
    """Some plugins drop the first report of a pipeline stage."""
    offer, d = p.prefill("at-p", PROMPT), decode_server()
    for side in (p, d):
        reads = confirmed_reads(side.part)
        assert reads is not None
        reads._workers = 2
    assert FIELD not in p.prefill("next", PROMPT)
    begin(d, offer)
    assert used(end(d))
    assert asked == []


@pytest.mark.parametrize("token", [7, None, "x" * 65, ["x"], "\ud800", "\u00e9"])
def test_a_token_that_is_none_is_as_if_there_were_none(
    p: PrefillServer, asked: list[Question], token: object
) -> None:
    d = decode_server()
    begin(d, p.prefill("at-p", PROMPT) | {FIELD: token})
    assert used(end(d))
    assert asked == []


def test_of_a_token_that_p_does_not_know_nothing_is_used(p: PrefillServer) -> None:
    d = decode_server()
    begin(d, p.prefill("at-p", PROMPT) | {FIELD: "x" * 64})
    [read] = confirmed_reads(d.part)._reads.values()  # type: ignore[union-attr]
    while not read.check._gone:  # P says so before the read is over
        d.step()
    assert not used(end(d))


def test_what_was_promised_is_given_away_once(
    p: PrefillServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The promise is the first reader's; the second has read; the promise ends, and then the first
    read, which has to be asked for again."""
    offer = p.prefill("at-p", PROMPT)
    first, second = decode_server("first/0"), decode_server("second/0")
    reads = confirmed_reads(p.part)
    assert reads is not None
    monkeypatch.setattr(read_check, "MARGIN", lease_book.PROMISE)  # as if the read had been slow
    begin(first, offer, "first")
    over = time.monotonic() + 5
    while reads.book._held["at-p"].reader is None and time.monotonic() < over:
        time.sleep(0.001)
    begin(second, offer, "second")
    nixl_of(second.worker).finish(*nixl_of(second.worker).in_flight())
    p.hears_of(second)
    assert "at-p" in p.scheduler.requests
    later = time.perf_counter() + lease_book.PROMISE
    monkeypatch.setattr(reads.book, "_clock", lambda: later)
    for _ in range(4):
        p.step()
    assert "at-p" not in p.scheduler.requests
    assert not reads.book._held
    assert not reads.book._ended
    assert "does not await" not in caplog.text  # it is said once that it is sent
    assert not used(end(first), "first")


def test_a_connector_may_name_what_was_sent_in_a_list(p: PrefillServer) -> None:
    """As several connectors' tests do, and no type forbids at run time."""
    p.prefill("at-p", PROMPT)
    reads = confirmed_reads(p.part)
    assert reads is not None
    sent = SimpleNamespace(kv_connector_output=KVConnectorOutput(finished_sending=["at-p"]))
    report = reads.settle(p.scheduler, sent).kv_connector_output
    assert report is not None
    assert report.finished_sending == {"at-p"}
    assert sent.kv_connector_output.finished_sending == ["at-p"], "it may be shared by all steps"


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Lets so much time pass as a paused engine takes no steps in."""
    clock = time.monotonic
    return lambda: monkeypatch.setattr(time, "monotonic", lambda: clock() + 2 * LONG)


@pytest.mark.parametrize("over", [True, False])
def test_what_has_ended_in_a_pause_is_used_as_on_stock(
    late: Callable[[], None], over: bool
) -> None:
    """Whatever became of P's lease. What goes on after the pause has no such excuse."""
    with prefill_server() as p:
        d = decode_server()
        begin(d, p.prefill("at-p", PROMPT))
        if over:
            nixl_of(d.worker).finish(*nixl_of(d.worker).in_flight())
        p.outlive_leases()
        late()
        steps = [d.step()]
        assert used(steps + end(d)) is over
    assert taken() == {"LEASE_ENDED": 1} | ({} if over else {"READ_REFUSED": 1})


def test_what_begins_after_a_pause_is_not_excused_by_it(
    late: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its handshake has lasted until then, and it is over within its first step."""
    shaken = threading.Event()
    with prefill_server() as p:
        d = Server("D/0")
        d.step()

        def shake_hands(peer: str, ranks: int) -> dict[Any, str]:
            shaken.wait(10)
            return register_peer(d.worker, peer, ranks)

        script_handshake(d.worker, shake_hands)
        begin(d, p.prefill("at-p", PROMPT))
        p.outlive_leases()
        late()
        shaken.set()
        await_handshakes(d.worker)
        nixl, start = nixl_of(d.worker), d._start

        def read_at_once(decided: SchedulerOutput) -> None:
            start(decided)
            nixl.finish(*nixl.in_flight())

        monkeypatch.setattr(d, "_start", read_at_once)
        assert not used(end(d))
    assert nixl.reads


def waits_for_an_answer(d: Server, offer: dict[str, Any]) -> None:
    """D has read, and P has not answered yet."""
    begin(d, offer)
    nixl_of(d.worker).finish(*nixl_of(d.worker).in_flight())
    d.step()
    assert confirmed_reads(d.part)._reads["r"].over  # type: ignore[union-attr]


def test_an_answer_that_a_pause_has_kept_waiting_is_waited_for(
    p: PrefillServer, late: Callable[[], None]
) -> None:
    d = decode_server()
    d.send("s", [7, *PROMPT], p.prefill("other", [7, *PROMPT]))
    d.step()
    assert used(end(d), "s"), "P has answered before"
    offer = p.prefill("at-p", PROMPT)
    p.leave_unanswered()
    waits_for_an_answer(d, offer)
    late()
    for _ in range(3):
        d.step()
    assert d.scheduler.requests["r"].status is RequestStatus.WAITING_FOR_REMOTE_KVS
    p.answer_again()
    assert used(end(d))


@pytest.mark.parametrize("asked", ["before", "after", "between two"])
def test_what_was_to_be_confirmed_in_a_pause_is_used_unless_p_has_said_no(
    late: Callable[[], None], asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P's lease ends in it. What P says of it to a question from before counts, whenever heard."""
    with prefill_server() as p:
        d, offer = decode_server(), p.prefill("at-p", PROMPT)
        p.leave_unanswered()
        begin(d, offer)
        reads = confirmed_reads(d.part)
        assert reads is not None
        check = reads._reads["r"].check
        assert check._asked is not None
        check.hears(check._asked, Answer(Standing.HELD, 0.0))
        nixl_of(d.worker).finish(*nixl_of(d.worker).in_flight())
        d.step()  # in which it asks again
        before = check._asked
        assert before is not None
        late()
        d.step()
        said = before if asked == "before" else check._asked
        assert said is not None
        if asked == "between two":
            clock = time.monotonic
            monkeypatch.setattr(time, "monotonic", lambda: clock() + 2 * LONG)
            d.step()
        check.hears(said, Answer(Standing.GONE, 0.0))
        assert used(end(d)) is (asked != "before")


def told(reads: ConfirmedReads, scheduler: Any = None, **report: Any) -> Any:  # noqa: ANN401
    """What a scheduler gets of such a report of its workers, or of a step without one."""
    said = KVConnectorOutput(**report) if report else None
    output: Any = SimpleNamespace(kv_connector_output=said)
    return reads.settle(scheduler, output).kv_connector_output


def asking(req_id: str) -> Any:  # noqa: ANN401 - a request
    return SimpleNamespace(request_id=req_id, is_finished=lambda: False)


def test_workers_are_heard_alone_and_among_those_of_other_connectors() -> None:
    said = WorkerReport(0, frozenset({"P/0"}), ended=frozenset({"r"}))
    among = SimpleNamespace(metadata=(None, object(), said))
    for meta, heard in ((object(), False), (said, True), (among, True)):
        reads = ConfirmedReads(1)
        token = reads.book.hold("r", float("inf"))
        told(reads, kv_connector_worker_meta=meta)
        assert reads.all_report is heard
        promised = reads.book.answer(token, "d", frozenset()).seconds
        assert (promised > 0) is not heard, "not where a worker has given the blocks up"


def test_a_question_goes_once_the_workers_are_known(
    p: PrefillServer, asked: list[Question]
) -> None:
    reads, offer = ConfirmedReads(1), p.prefill("at-p", PROMPT)
    for _ in range(2):
        reads.begin(asking("r"), offer, frozenset({1}))
    told(reads)
    assert asked == []
    assert list(reads._reads) == ["r"], "the last of its id"
    told(reads, kv_connector_worker_meta=WorkerReport(0, frozenset({"D/0"})))
    assert [question.agents for question in asked] == [{"D/0"}]
    reads.begin(asking("r"), offer, frozenset({1}))
    assert len(asked) == 2
    assert len(reads._readers) == 1


def test_what_is_over_at_some_ranks_has_not_ended_unseen(p: PrefillServer) -> None:
    """The others may begin only now: the end of all comes in a later report."""
    reads, offer = ConfirmedReads(1), p.prefill("at-p", PROMPT)
    reads.agents.add("D/0")
    reads.begin(asking("r"), offer, frozenset({1}))
    [read] = reads._reads.values()
    here = SimpleNamespace(requests={"r": asking("r")})
    seen = WorkerReport(0, unseen={"r": True, "gone": True})
    for finished, is_unseen in ((set(), False), ({"r"}, True)):
        told(reads, here, kv_connector_worker_meta=seen, finished_recving=finished)
        assert (read.unseen is not None) is is_unseen


@pytest.mark.parametrize(
    ("field", "failed"), [("invalid_block_ids", [{1}, {9}]), ("failed_recving", [{"a"}, {"z"}])]
)
def test_who_has_failed_or_left_waits_for_no_answer_and_nobody_else(
    p: PrefillServer, field: str, failed: list[Any]
) -> None:
    if not hasattr(KVConnectorOutput(), field):
        pytest.skip("from 0.30.0 on")
    reads, offer = ConfirmedReads(1), p.prefill("at-p", PROMPT)
    reads.agents.add("D/0")
    p.leave_unanswered()
    for block, req_id in enumerate("abc", 1):
        reads.begin(asking(req_id), offer, frozenset({block}))
    for each in failed:
        told(reads, **{field: each})
    here = SimpleNamespace(requests={req_id: asking(req_id) for req_id in "ab"})
    assert told(reads, here, finished_recving=set("abc")).finished_recving == {"a", "c"}


def test_peers_are_named_once_each_and_not_without_end(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "unconfirmed", BoundedLog(module.logger))
    reads = ConfirmedReads(1)
    for engine in "ABBA":
        reads.begin(asking("r"), {"remote_engine_id": engine}, frozenset({1}))
    monkeypatch.setattr(module, "MAX_NAMED", 2)
    reads.begin(asking("r"), {"remote_engine_id": "C"}, frozenset({1}))
    assert [line.split()[3] for line in caplog.messages] == ["A", "B"]
    assert taken() == {"PEER_UNCONFIRMED": 2}


@pytest.mark.parametrize(("held", "answer"), [(False, {"a": 1}), (True, None)])
def test_what_is_not_held_for_a_reader_gets_no_token(held: bool, answer: Any) -> None:  # noqa: ANN401
    part = decode_server().part
    part._reqs_need_send["r"] = float("inf")
    finish = announces_lease(lambda *_: (held, copy.copy(answer)))
    assert finish(part, asking("r")) == (held, answer)


@pytest.mark.parametrize(
    ("params", "tokens", "blocks"),
    [({FIELD: "x"}, 0, [[1]]), (None, 9, [[1]]), ({FIELD: "x"}, 9, None), ({FIELD: "x"}, 9, [[]])],
)
def test_nothing_is_asked_of_what_is_not_read(
    asked: list[Question],
    params: Any,  # noqa: ANN401
    tokens: int,
    blocks: Any,  # noqa: ANN401
) -> None:
    part, request = decode_server().part, asking("r")
    request.kv_transfer_params = params and OFFER | params
    if blocks is not None:
        part._reqs_need_recv["r"] = request, blocks
    asks_about_lease(lambda *_: None)(part, request, None, tokens)
    assert asked == []
    assert not confirmed_reads(part)._reads  # type: ignore[union-attr]


def test_a_part_without_an_engine_confirms_nothing() -> None:
    """As some of vLLM's own tests make it."""
    bare = SimpleNamespace(vllm_config=decode_server().part.vllm_config)
    assert confirmed_reads(bare) is None


def test_a_lease_that_ends_is_told_in_a_report_where_there_is_one() -> None:
    mute, heard = SimpleNamespace(), SimpleNamespace(_heard={})
    for worker in (mute, heard):
        lease_ended(worker, "r")
    assert vars(mute) == {}
    assert vars(heard) == {"_heard": {}, "_ended_leases": {"r"}}
    assert taken() == {"LEASE_ENDED": 2}


def switch_off(server: Server) -> None:
    config: Any = server.worker.vllm_config.kv_transfer_config
    config.kv_connector_extra_config["confirm_reads"] = False
    vars(server.part).pop("_confirmed_reads", None)  # it is read once, at the start


def test_a_p_that_is_told_so_announces_nothing(p: PrefillServer) -> None:
    switch_off(p)
    assert FIELD not in p.prefill("at-p", PROMPT)


def test_a_d_that_is_told_so_asks_nothing(
    p: PrefillServer, asked: list[Question], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    d = decode_server()
    switch_off(d)
    begin(d, p.prefill("at-p", PROMPT))
    assert used(end(d))
    assert asked == []
    assert "unconfirmed" not in caplog.text


def test_a_prompt_that_is_cached_is_not_asked_for(p: PrefillServer, asked: list[Question]) -> None:
    d = decode_server()
    begin(d, p.prefill("at-p", PROMPT))
    end(d)
    before = len(asked)
    begin(d, p.prefill("again", PROMPT), "again")
    end(d)
    assert len(asked) - before <= 1  # the last block is never cached


@pytest.mark.parametrize("late", [False, True])
def test_a_second_turn_does_not_use_what_the_decode_server_has_given_away(
    p: PrefillServer, late: bool
) -> None:
    """What upstream's #47021 is about: there the roles are the other way round."""
    pytest.importorskip(TWO_WAY, reason="from 0.21.0 on")
    keeps = 0.05 if late else 100.0
    with prefill_server(keeps) as decode:
        two_way(decode, keeps)
        connect(decode.worker, "P")
        begin(decode, p.prefill("at-p", PROMPT), "turn-1")
        assert used(end(decode, 1.0), "turn-1")
        offer = decode.offer("turn-1")
        assert offer["do_remote_decode"]
        if late:
            decode.outlive_leases()
        assert ("turn-1" in decode.scheduler.requests) is not late
        prefill = two_way(decode_server())
        begin(prefill, offer, "turn-2")
        assert used(end(prefill, 8.0), "turn-2") is not late


@pytest.mark.parametrize("rounds", [50])
def test_nothing_is_left_of_what_is_over(p: PrefillServer, rounds: int) -> None:
    d = decode_server()
    for n in range(rounds):
        begin(d, p.prefill(f"p{n}", [n, *PROMPT]), f"d{n}")
        end(d)
        p.hears_of(d)
    reads, book = confirmed_reads(d.part), confirmed_reads(p.part).book  # type: ignore[union-attr]
    assert reads is not None
    assert not reads._reads
    assert not reads._readers
    assert not book._held
    assert not book._by_token
    assert not book._ended

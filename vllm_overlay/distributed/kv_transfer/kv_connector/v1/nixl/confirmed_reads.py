# SPDX-License-Identifier: Apache-2.0
"""All releases: D uses no block of which P does not say that it still held the KV.

P announces with `kv_transfer_params` a token of the lease on a request's blocks (`remote_lease`). D
asks P's side channel about it when it begins to read, and keeps the report that the read is over
until it knows that this was in time (`read_check`). What was not is a failed receive, and
`kv_load_failure_policy` decides what becomes of the request, as with any other.

Where a P announces nothing (stock, or told not to) all is as on stock, and D says so once for each.
So it is where not all of an engine's workers report to its scheduler: a P announces nothing before
they have, and a D asks nothing. (Up to 0.19.1 the second model runner makes no report, and that of
some plugins drops those of pipeline stages.) And so it is with a P that has never answered: D's
scheduler may be where only its workers can reach P.
What ended while D took no steps, as when it is paused, is used too (`unseen_ends`).
`"confirm_reads": false` in `kv_connector_extra_config` turns it off, on either side.
"""

from __future__ import annotations

import copy
import functools
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from itertools import count as count_up
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.logger import init_logger
from vllm.v1.outputs import KVConnectorOutput

from vllm_overlay.distributed.kv_transfer.fix_counts import Acted, count
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.connector import WorkerReport
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.lease_questions import (
    LeaseQuestions,
    Peer,
    Question,
    now,
    open_book,
)
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.params import printable
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.read_check import (
    ReadCheck,
    Verdict,
)
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.scheduler import has_engine
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.unseen_ends import LONG
from vllm_overlay.logging_utils.bounded_log import BoundedLog

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

logger = init_logger(f"vllm.{__name__}")
refusals, unconfirmed, unseen = BoundedLog(logger), BoundedLog(logger), BoundedLog(logger)

FIELD = "remote_lease"
"""Of `kv_transfer_params`: the token of the lease on the blocks that they name."""

MAX_NAMED = 2**10
"""Peers of which something is remembered: whether they answer, that their reads are unconfirmed."""

MAX_UNSIGNED = 2**10
"""Reads that are begun before the workers' first report."""

_Part = Any
"""NIXL's part of a scheduler: `NixlConnectorScheduler`, from 0.24.0 on the one that pulls."""

_Method = Callable[..., Any]

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


@dataclass
class _Read:
    """A receive that the scheduler awaits.

    Attributes:
        reader: What sets it apart from all others, of any engine.
        over: All ranks have reported its end.
        failed: One of them has reported that it failed.
        unseen: Since when nobody looked, if it has ended, or was to be confirmed, in such a time.
    """

    req_id: str
    peer: Peer
    token: str
    blocks: frozenset[int]
    check: ReadCheck
    reader: str
    over: bool = False
    failed: bool = False
    unseen: float | None = None


class ConfirmedReads:
    """What an engine's scheduler has promised to readers, and the reads that it awaits itself."""

    def __init__(self, workers: int) -> None:
        """Begin with nothing; the engine has so many workers, with an agent each."""
        self._workers = workers
        self.book = open_book()
        self.questions = LeaseQuestions()
        self.agents: set[str] = set()  # of the engine's own workers, once they have reported
        self._name, self._numbers = uuid.uuid4().hex, count_up()
        self._reads: dict[str, _Read] = {}  # by request
        self._readers: dict[str, _Read] = {}
        self._unsigned: list[_Read] = []
        self._answers: dict[Peer, bool] = {}  # whether it has, of those that were waited for
        self._unheard: dict[str, Peer] = {}  # by reader, of what was used without an answer
        self._settled = now()
        self._unconfirmed: set[str] = set()

    def begin(self, request: Request, params: dict[str, Any], blocks: frozenset[int]) -> None:
        """Ask P about what is about to be read into `blocks`, if P has announced a lease."""
        token = params.get(FIELD)
        if not isinstance(token, str) or not token.isascii() or len(token) > 64:
            engine = printable(str(params.get("remote_engine_id")))
            self._say_unconfirmed(engine, "its kv_transfer_params announce no lease")
            return
        asked = now()
        peer = Peer(params["remote_host"], int(params["remote_port"]))
        reader = f"{self._name}-{next(self._numbers)}"
        read = _Read(request.request_id, peer, token, blocks, ReadCheck(asked), reader)
        self._forget(request.request_id)
        self._reads[read.req_id] = self._readers[read.reader] = read
        if self.all_report:
            self._ask(read, asked)
        else:  # P has to know whose they are
            self._unsigned.append(read)
            if len(self._unsigned) > MAX_UNSIGNED:  # nobody settles: a scheduler of its own
                self._forget(self._unsigned[0].req_id)

    @property
    def all_report(self) -> bool:
        """Whether all of the engine's workers have made their first report."""
        return len(self.agents) >= self._workers

    def settle(self, scheduler: Scheduler, output: ModelRunnerOutput) -> ModelRunnerOutput:
        """Return the workers' report without reads that are not confirmed yet, and with those that
        have been since the last; those of which P says that it held the blocks no more are failed.
        Nor with what was sent and is held for a promise, until that is over.
        """
        before = self._settled
        if now() - before > LONG:
            self._go_on(before)
        try:
            return self._settle(scheduler, output, before)
        finally:
            self._settled = now()  # here: what this has asked was asked before what comes now

    def _settle(
        self, scheduler: Scheduler, output: ModelRunnerOutput, before: float
    ) -> ModelRunnerOutput:
        report: KVConnectorOutput = output.kv_connector_output or KVConnectorOutput()
        said = None
        if report.kv_connector_worker_meta is not None:
            said = _said(report.kv_connector_worker_meta)
            self._hear(said)
        if self._unsigned and output.kv_connector_output is not None:
            self._sign()
        sent = report.finished_sending or set()
        done = self.book.due().union(sent)
        freed = self.book.free(done) if done else done
        if not self._reads and freed == sent:
            return output
        finished = report.finished_recving or set()
        self._take_replies()
        self._take(report)
        if said is not None and said.unseen:
            self._take_unseen(said.unseen, before)
        kept: set[str] = set()
        released: set[str] = set()
        refused: dict[str, frozenset[int]] = {}
        for read in [read for read in self._reads.values() if read.over]:
            verdict = self._verdict(scheduler, read)
            if verdict in (Verdict.WAIT, Verdict.ASK):
                kept.add(read.req_id)
                continue
            self._forget(read.req_id)
            released.add(read.req_id)
            if verdict is Verdict.REFUSE:
                refused[read.req_id] = read.blocks
        if not kept & finished and released <= finished and not refused and freed == sent:
            return output
        report = replace(
            report,
            finished_recving=finished - kept | released,
            finished_sending=freed,
        )
        _fail(report, refused)
        output = copy.copy(output)  # one that reports nothing is shared by all steps
        output.kv_connector_output = report
        return output

    def _hear(self, said: WorkerReport | None) -> None:
        """Note what the workers have told."""
        if said is None:
            return
        self.agents |= said.agents
        self.book.hear(said.heard)
        self.book.expire(said.ended)

    def _go_on(self, since: float) -> None:
        """Note that nothing was settled for long: what could be confirmed meanwhile was not."""
        for read in self._reads.values():
            read.check.resumes(now())
            if read.over and read.unseen is None:
                read.unseen = since

    def _sign(self) -> None:
        """Ask about what was begun before the workers made their first report, if they have."""
        unsigned, self._unsigned = self._unsigned, []
        for read in unsigned:
            if self.all_report:
                time = now()
                read.check.asks(time)
                self._ask(read, time)
            else:
                self._forget(read.req_id)
                self._say_unconfirmed(_where(read.peer), "not all workers of this one report")

    def _take_replies(self) -> None:
        for reply in self.questions.replies():
            if (read := self._readers.get(reply.reader)) is not None:
                read.check.hears(reply.asked, reply.answer)
                _put_last(self._answers, read.peer, True)
            elif (peer := self._unheard.pop(reply.reader, None)) is not None:
                _put_last(self._answers, peer, True)

    def _take(self, report: KVConnectorOutput) -> None:
        """Note which reads are over, and which have failed anyhow."""
        for req_id in report.finished_recving or ():
            if (read := self._reads.get(req_id)) is not None:
                read.check.ends(now())
                read.over = True
        failed = getattr(report, "failed_recving", ())
        if failed or report.invalid_block_ids:
            for read in self._reads.values():
                read.failed |= read.req_id in failed
                read.failed |= not read.blocks.isdisjoint(report.invalid_block_ids)

    def _take_unseen(self, unseen: Mapping[str, bool], since: float) -> None:
        """Note which reads are over since nobody looked, at all of the ranks."""
        for req_id, is_so in unseen.items():
            if (read := self._reads.get(req_id)) is not None and is_so and read.over:
                read.unseen = since

    def _verdict(self, scheduler: Scheduler, read: _Read) -> Verdict:
        request = scheduler.requests.get(read.req_id)
        if read.failed or request is None or request.is_finished():
            return Verdict.USE  # nobody will: it is known to be bad, or not wanted any more
        time = now()
        verdict = read.check.verdict(time)
        answers = read.check.is_answered or self._answers.get(read.peer)
        if not answers and (verdict is Verdict.REFUSE or answers is not None):
            self._use_unheard(read)
            return Verdict.USE
        if verdict is Verdict.ASK:
            read.check.asks(time)
            self._ask(read, time)
        elif verdict is Verdict.REFUSE and _may_have_been_held(read):
            unseen.warning(
                "Request %s uses KV of which the prefill server at %s:%s does not say that it "
                "still held the blocks: this engine took no steps meanwhile, as when it is paused.",
                printable(read.req_id),
                read.peer.host,
                read.peer.port,
            )
            return Verdict.USE
        elif verdict is Verdict.REFUSE:
            count(Acted.READ_REFUSED)
            refusals.warning(
                "Request %s does not use the KV that it has read: the prefill server at %s:%s does "
                "not say that it still held the blocks. kv_load_failure_policy applies.",
                printable(read.req_id),
                read.peer.host,
                read.peer.port,
            )
        return verdict

    def _use_unheard(self, read: _Read) -> None:
        """Note that a read is used although P has never answered, until it does."""
        _put_last(self._answers, read.peer, False)
        _put_last(self._unheard, read.reader, read.peer)
        self._say_unconfirmed(_where(read.peer), "it has answered no question")

    def _ask(self, read: _Read, time: float) -> None:
        question = Question(read.token, read.reader, frozenset(self.agents), time)
        self.questions.ask(read.peer, question)

    def _forget(self, req_id: str) -> None:
        read = self._reads.pop(req_id, None)
        if read is not None:
            del self._readers[read.reader]
            if read in self._unsigned:
                self._unsigned.remove(read)

    def _say_unconfirmed(self, engine: str, why: str) -> None:
        if engine in self._unconfirmed or len(self._unconfirmed) == MAX_NAMED:
            return
        self._unconfirmed.add(engine)
        count(Acted.PEER_UNCONFIRMED)
        unconfirmed.warning(
            "Reads from engine %s are unconfirmed: %s. If it frees blocks while they are read, "
            "that stays unnoticed.",
            engine,
            why,
        )


def _may_have_been_held(read: _Read) -> bool:
    """Whether P may have held the blocks when a read ended, and D not have looked in time."""
    return read.unseen is not None and not read.check.was_gone(read.unseen)


def _put_last(known: dict[_Key, _Value], key: _Key, value: _Value) -> None:
    """Enter what is known of a key as the newest, of the `MAX_NAMED` that are kept."""
    known.pop(key, None)
    known[key] = value
    if len(known) > MAX_NAMED:
        del known[next(iter(known))]


def _where(peer: Peer) -> str:
    return printable(f"at {peer.host}:{peer.port}")


def _said(said: object) -> WorkerReport | None:
    """Return what NIXL's workers have told, alone or among several connectors' workers."""
    among = (said, *getattr(said, "metadata", ()))
    return next((one for one in among if isinstance(one, WorkerReport)), None)


def _fail(report: Any, refused: Mapping[str, frozenset[int]]) -> None:  # noqa: ANN401
    """Add failed receives to a report, as the release's own worker does."""
    if hasattr(report, "failed_recving"):  # from 0.30.0 on
        report.failed_recving = report.failed_recving | refused.keys()
    else:
        report.invalid_block_ids = report.invalid_block_ids.union(*refused.values())


def confirmed_reads(part: _Part) -> ConfirmedReads | None:
    """Return what NIXL's part of a scheduler has promised; None if it is set up not to."""
    known = part.__dict__
    if "_confirmed_reads" not in known:
        on = has_engine(part) and part.vllm_config.kv_transfer_config.get_from_extra_config(
            "confirm_reads", True
        )
        workers = part.vllm_config.parallel_config.world_size if on else 0
        known["_confirmed_reads"] = ConfirmedReads(workers) if on else None
    reads: ConfirmedReads | None = known["_confirmed_reads"]
    return reads


# ---------------------------------------------------------------- hooks


def announces_lease(finish: _Method) -> _Method:
    """Have `request_finished` hand out a token of the lease with the blocks that are to be read."""

    @functools.wraps(finish)
    def wrapper(self: _Part, request: Request, *args: Any, **named: Any) -> Any:  # noqa: ANN401
        held, params = finish(self, request, *args, **named)
        until = self._reqs_need_send.get(request.request_id) if held and params else None
        if until is None or (reads := confirmed_reads(self)) is None:
            return held, params
        if reads.all_report:  # else nobody would say who has read the blocks
            params[FIELD] = reads.book.hold(request.request_id, until)
        return held, params

    return wrapper


def asks_about_lease(update: _Method) -> _Method:
    """Have `update_state_after_alloc` ask P about the lease on blocks that are to be read."""

    @functools.wraps(update)
    def wrapper(self: _Part, request: Request, blocks: object, num_external_tokens: int) -> None:
        params = request.kv_transfer_params
        update(self, request, blocks, num_external_tokens)
        asked_for = self._reqs_need_recv.get(request.request_id)
        if not num_external_tokens or asked_for is None or not params:
            return  # nobody waits for a read
        read_into = frozenset(chain.from_iterable(asked_for[1]))
        if read_into and (reads := confirmed_reads(self)) is not None:
            reads.begin(request, params, read_into)

    return wrapper


def lease_ended(worker: Any, req_id: str) -> None:  # noqa: ANN401 - `NixlConnectorWorker` or kin
    """Note that a worker of P gives up blocks that nobody has read, for its next report."""
    if "_heard" in vars(worker):  # there is one, as in `inbox`
        vars(worker).setdefault("_ended_leases", set()).add(req_id)
    count(Acted.LEASE_ENDED)

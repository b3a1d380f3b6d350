"""One engine: the release's scheduler and connector on both sides, and a stand-in for the model.

What the engine core and the model runners do with these is done here as they do it: a step is
scheduled, each rank hears of it and reports, the model runs, and the scheduler gets the output.
With async scheduling a second step is scheduled before the first one's output is there; then the
model runs when the history says so, at the latest when its output is wanted.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import pickle
import queue
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1 import kv_cache_interface
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore, EngineCoreProc, EngineShutdownState
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker import kv_connector_model_runner_mixin as runner

from tests.simulation.cells import Cells
from tests.simulation.clock import Clock, Place
from tests.simulation.side_channel import Listener
from tests.simulation.slots import Mode, Slots, Span
from tests.simulation.text import WRONG, Text
from tests.simulation.wire import Agent, Wire
from tests.support.hybrid_engine import WHOLE, speculate, states
from tests.support.nixl_release import NixlConnectorScheduler, connector_module
from tests.support.nixl_worker import GroupKind, make_worker
from tests.support.offering import introduce

try:
    from vllm.entrypoints.generate.base.serving import GenerateBaseServing as Serving
except ModuleNotFoundError:
    from vllm.entrypoints.openai.engine.serving import OpenAIServing as Serving

HOST = "10.0.0."
"""Where engines listen; nothing is sent there."""


@dataclass(frozen=True)
class Shape:
    """How an engine is set up.

    Attributes:
        ranks: tensor-parallel ranks.
        nodes: machines over which they are spread; each has its own monotonic clock.
        blocks: of the cache, with the null block.
        budget: tokens in a step at most.
        asynchronous: a step is scheduled while another is in flight.
        lookahead: slots that a speculative decoder wants beyond a request's tokens. With states
            it is as the configuration says, a draft model's; else the scheduler alone is told.
        guesses: whether it fills them, with guesses of which the first are right, or none.
        edge: also the oldest token of a sliding window is looked at. Where the whole prompt was
            received, releases have given its block up by then: docs/simulation.md.
        keeps: seconds for which D keeps the blocks of what it has answered, for P to read in a
            second turn; None for transfers in one direction. From 0.21.0 on, which have both.
        mode: how states are kept (`mamba_cache_mode`); prefixes with them, if not "none".
        unit: tokens of a hash, if they are fewer than those of a block: from 0.26.0 on.
        exports: layers export a state from within a step: from 0.30.0 on.
    """

    ranks: int = 1
    nodes: int = 1
    blocks: int = 24
    block_size: int = 4
    budget: int = 16
    seqs: int = 4
    groups: tuple[GroupKind, ...] = ("full",)
    mla: bool = False
    asynchronous: bool = False
    policy: Any = "recompute"
    lookahead: int = 0
    guesses: bool = False
    edge: bool = False
    keeps: int | None = None
    mode: Mode = "none"
    unit: int | None = None
    exports: bool = False

    @property
    def states(self) -> bool:
        """Whether the model has recurrent states."""
        return "mamba" in self.groups

    @property
    def state_tokens(self) -> int:
        """Tokens in a block of states; of all, where a sequence has one block for them."""
        return WHOLE if self.mode == "none" else self.block_size

    @property
    def hash_tokens(self) -> int:
        """Tokens of which there is a hash."""
        return self.unit or self.block_size

    @property
    def extra_config(self) -> dict[str, Any]:
        """What the connector is told."""
        if self.keeps is None:
            return {}
        return {
            "bidirectional_kv_xfer": True,
            "kv_recompute_threshold": 0,
            "decoder_kv_blocks_ttl": self.keeps,
        }


class DiedError(Exception):
    """The release raised where that ends the engine; `__cause__` is what it raised."""

    def __init__(self, engine: str, where: str) -> None:
        super().__init__(f"{engine} dies in {where}")
        self.engine = engine


class _IdleError(BaseException):
    """Leaves the engine core's loop where it would wait for input."""


@dataclass
class Work:
    """What a step computes of one request: tokens from `start` to before `end`, and guesses.

    Attributes:
        guesses: of the tokens from `end` on; -1 where the scheduler does not know them.
        before: the same request's part of a step that was in flight then. The scheduler counts as
            if all that it guesses were right.
        fresh: it was not in the step before, or was preempted since.
        rejected: how many of `guesses` were not, once it has been computed.
    """

    req_id: str
    tables: tuple[list[int], ...]
    start: int
    end: int
    samples: bool
    guesses: list[int]
    before: Work | None
    fresh: bool
    rejected: int = 0

    @property
    def late(self) -> int:
        """How many positions before `start` it begins, once `before` has been computed."""
        return self.before.rejected if self.before else 0

    @property
    def span(self) -> Span:
        """What it computes, once `before` has been computed."""
        end = self.end + len(self.guesses)
        return Span(self.start - self.late, end - self.late, len(self.guesses))


@dataclass
class Step:
    """A step that was scheduled; `tokens` is what the model sampled, None as long as it has not
    run."""

    decided: Any
    work: list[Work]
    reports: list[KVConnectorOutput]
    tokens: dict[str, list[int]] | None = None


@dataclass
class Rank:
    """A worker process."""

    place: Place
    connector: Any
    worker: Any
    agent: Agent
    cells: Cells


@dataclass(frozen=True)
class Surroundings:
    """What all engines share."""

    clock: Clock
    wire: Wire
    text_of: Callable[[str], Text]
    note: Callable[[str, str], None]


@dataclass
class Told:
    """What a client is told of a request in one step."""

    req_id: str
    tokens: list[int]
    finish: str | None
    params: dict[str, Any] | None = field(default=None)


class Engine:
    """See the module.

    Attributes:
        name: what it is called here, for as long as the history; `engine_id` is what peers call it.
        steps: scheduled and without output, the newest first.
        stepped: whether its workers took part in a step in the last round of its loop.
        wrong: request -> what was wrong with the KV that it was computed from.
        asked, reported: request -> receives that the workers were asked for, and were said to be
            over.
    """

    def __init__(
        self, name: str, engine_id: str, port: int, shape: Shape, around: Surroundings
    ) -> None:
        self.name, self.engine_id, self.shape, self.around = name, engine_id, shape, around
        self.host, self.port = f"{HOST}{port}", port
        self.steps: deque[Step] = deque()
        self.wrong: dict[str, str] = {}
        self.asked: Counter[str] = Counter()
        self.reported: Counter[str] = Counter()
        self.stepped = False
        self._awaits = False
        self._guessed: dict[str, list[int]] = {}
        self._slots = Slots(shape.mode, shape.state_tokens)
        self._tables: dict[str, tuple[list[int], ...]] = {}
        self.listener: Listener
        clock = around.clock
        places = [Place(name, rank) for rank in range(shape.ranks)]
        address = {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": self.host,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
        }
        with mock.patch.dict(os.environ, address):
            self.ranks = [self._rank(place) for place in places]
            self.scheduler = self._scheduler()
            with clock.at(Place(name)), mock.patch.object(threading, "Thread", self._listen):
                said = {r.place.rank: r.connector.get_handshake_metadata() for r in self.ranks}
                introduce(self.scheduler.connector, said)
        self._aggregator = KVOutputAggregator(shape.ranks)
        self.core = self._core()
        self.client = _Client(self)

    # Set-up.

    def _rank(self, place: Place) -> Rank:
        shape, around = self.shape, self.around
        agents: list[Agent] = []

        def agent(*_: object) -> Agent:
            agents.append(around.wire.agent(place))
            return agents[-1]

        slots = states(
            shape.state_tokens, mode=shape.mode, guesses=shape.lookahead, exports=shape.exports
        )
        with around.clock.at(place), slots:
            worker = make_worker(
                engine_id=self.engine_id,
                tp_size=shape.ranks,
                tp_rank=place.rank,
                mla=shape.mla,
                groups=shape.groups,
                block_size=shape.block_size,
                num_blocks=shape.blocks,
                policy=shape.policy,
                # Of states not by default.
                prefix_caching=not shape.states or shape.mode != "none",
                extra_config=shape.extra_config,
                nixl={"NixlWrapper": agent, "nixl_agent_config": None},
            )
            if shape.states and shape.lookahead:
                speculate(worker.vllm_config, shape.lookahead, drafts=True)
            kind = type(worker).__name__
            with mock.patch.object(connector_module, kind, lambda *_: worker):
                connector = connector_module.NixlConnector(
                    worker.vllm_config, KVConnectorRole.WORKER, worker.kv_cache_config
                )
        cells = Cells(worker, place.rank)
        return Rank(place, connector, worker, agents[0], cells)

    def _scheduler(self) -> Scheduler:
        shape, first = self.shape, self.ranks[0].worker
        config = first.vllm_config
        config.cache_config.num_gpu_blocks = shape.blocks
        config.cache_config.mamba_cache_mode = shape.mode
        config.scheduler_config.max_num_batched_tokens = shape.budget
        # A CPU platform turns it off for latent caches; what is simulated is none.
        config.scheduler_config.enable_chunked_prefill = True
        config.scheduler_config.max_num_seqs = shape.seqs
        config.scheduler_config.async_scheduling = shape.asynchronous
        kind = AsyncScheduler if shape.asynchronous else Scheduler
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(shape.hash_tokens, sha256)
        with self.around.clock.at(Place(self.name)):
            scheduler = kind(
                vllm_config=config,
                kv_cache_config=first.kv_cache_config,
                structured_output_manager=StructuredOutputManager(config),
                # The largest of a group.
                block_size=shape.state_tokens if shape.states else shape.block_size,
                **({"hash_block_size": shape.unit} if shape.unit else {}),
            )
        if shape.lookahead and not shape.states:
            # As for EAGLE. With a draft model D would reserve such slots while it loads, too, from
            # 0.23.0 on (#46694), and `speculative_config` would say so.
            scheduler.num_lookahead_tokens = shape.lookahead
            scheduler.use_eagle = True
            if shape.guesses:
                scheduler.num_spec_tokens = shape.lookahead
                scheduler._spec_token_placeholders = [-1] * shape.lookahead
            if hasattr(scheduler, "_spec_decode_step_blocks"):  # from 0.31.0 on: kept from loads
                scheduler.num_spec_tokens = shape.lookahead
                scheduler._spec_decode_step_blocks = sum(
                    -(-(1 + 2 * shape.lookahead) // manager.block_size)
                    for manager in scheduler.kv_cache_manager.coordinator.single_type_managers
                )
        return scheduler

    def _listen(self, **kwargs: Any) -> Listener:  # noqa: ANN401
        self.listener = Listener(**kwargs)
        return self.listener

    def answer(self, question: list[bytes]) -> list[bytes]:
        """What the side channel answers a peer that asks; raises `zmq.Again` if nothing."""
        with self.around.clock.at(Place(self.name)):
            home: Any = _module_of(self._connector_scheduler)
            return self.listener.ask(question, home)

    def end(self) -> None:
        """Its processes are gone, and with them what they knew of leases."""
        vars(self._connector_scheduler).pop("_confirmed_reads", None)

    @property
    def _connector_scheduler(self) -> Any:  # noqa: ANN401 - of another name from 0.24.0 on
        connector: Any = self.scheduler.connector
        return connector.connector_scheduler

    def _core(self) -> Any:  # noqa: ANN401 - an engine core without its constructor
        core: Any = object.__new__(EngineCoreProc)
        vars(core).update(
            scheduler=self.scheduler,
            model_executor=SimpleNamespace(is_sleeping=False),
            input_queue=_Input(),
            aborts_queue=queue.Queue(),
            output_queue=queue.Queue(),
            process_input_queue_block=True,
            shutdown_state=EngineShutdownState.RUNNING,
            engines_running=False,
            batch_queue=self.steps,
            _idle_state_callbacks=[],
            publish_dp_lb_stats=False,
            eep_scaling_state=None,
            step_fn=self._look,
            post_step=lambda _: None,
        )
        return core

    # What clients do.

    def add(self, req_id: str, text: Text, length: int, tokens: int, params: Any) -> None:  # noqa: ANN401
        """Take a request for `tokens` tokens after the first `length` of a text."""
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
        sampling.update_from_generation_config({}, 1)
        request = Request(
            request_id=req_id,
            prompt_token_ids=text.tokens[:length],
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=self._hasher,
        )
        request.kv_transfer_params = params
        self._enter("a request", EngineCore.add_request, self.core, request)

    async def take(self, request: EngineCoreRequest) -> None:
        """Take what the API server sends by itself."""
        made = Request.from_engine_core_request(request, self._hasher)
        self._enter("a rejection", EngineCore.add_request, self.core, made)

    def abort(self, req_id: str) -> None:
        self._enter("an abort", EngineCore.abort_requests, self.core, [req_id])

    def reject(self, req_id: str, params: dict[str, Any]) -> None:
        """Turn a request away as the handlers of the API server do, before the engine core has it.

        Releases without a clean-up for that do nothing.
        """
        cleanup = getattr(Serving, "_with_kv_transfer_rejection_cleanup", None)
        if cleanup is None:
            return
        serving: Any = object.__new__(Serving)
        serving.engine_client = self.client
        if not hasattr(serving, "has_kv_connector"):
            serving.has_kv_connector = True
        request = SimpleNamespace(request_id=req_id, kv_transfer_params=params)
        with self.around.clock.at(Place(self.name)), contextlib.suppress(RejectedError):
            asyncio.run(cleanup(serving, _refuse(), request, None))

    def _enter(self, what: str, call: Callable[..., Any], *args: object) -> Any:  # noqa: ANN401
        with self.around.clock.at(Place(self.name)):
            try:
                return call(*args)
            except Exception as error:
                raise DiedError(self.name, what) from error

    # Its loop.

    def tick(self) -> list[Told]:
        """Go once round the engine core's loop."""
        self._told: list[Told] = []
        self.stepped = False
        if self.core.has_work():
            self._go_on()
        else:
            with contextlib.suppress(_IdleError):
                self._enter("the idle loop", self.core._process_input_queue)
        return self._told

    def _look(self) -> tuple[dict[int, Any], bool]:
        """A step of an engine that has nothing to do but wants to look."""
        if self.scheduler.has_requests():
            self._go_on()
            if self._awaits:
                self._go_on()
        return {}, False

    def _go_on(self) -> None:
        """Schedule a step, or take the output of the oldest where the core waits for that.

        In between lies whatever happens while the core waits: a read goes on, a client leaves.
        """
        if self._awaits:
            self._awaits = False
            self.compute()
            self._output(self.steps.pop())
        elif self.scheduler.has_requests():
            self._schedule()
            depth = 2 if self.shape.asynchronous else 1
            self._awaits = len(self.steps) == depth or not self.steps[0].work
        elif self.steps:
            self._awaits = True

    def _schedule(self) -> None:
        self.stepped = True
        decided: Any = self._enter("schedule", self.scheduler.schedule)
        for req_id, meta in getattr(decided.kv_connector_metadata, "reqs_to_recv", {}).items():
            self.asked[req_id] += any(meta.local_block_ids)
        for req_id in decided.finished_req_ids:
            self._slots.forget(req_id)
            self._tables.pop(req_id, None)
        self._hear(decided)
        work = []
        for req_id, count in decided.num_scheduled_tokens.items():
            request = self.scheduler.requests[req_id]
            guesses = list(decided.scheduled_spec_decode_tokens.get(req_id, ()))
            start = request.num_computed_tokens - count
            end = start + count - len(guesses)
            if end <= start:
                odd = ValueError(f"{len(guesses)} guesses among {count} tokens")
                raise DiedError(self.name, "a step") from odd
            fresh = self._is_fresh(decided, req_id)
            work.append(
                Work(
                    req_id,
                    self._table(req_id),
                    start,
                    end,
                    end >= request.num_tokens,
                    guesses,
                    self._in_flight(req_id, start),
                    fresh,
                )
            )
        said = " ".join(f"{w.req_id}[{w.start}:{w.end}]" for w in work)
        if said:
            self.around.note(self.name, f"schedules {said}")
        reports = [self._execute(rank, decided) for rank in self.ranks]
        self.steps.appendleft(Step(decided, work, reports))

    @staticmethod
    def _is_fresh(decided: Any, req_id: str) -> bool:  # noqa: ANN401
        new = (each.req_id for each in decided.scheduled_new_reqs)
        return req_id in {*new, *decided.scheduled_cached_reqs.resumed_req_ids}

    def _hear(self, decided: Any) -> None:  # noqa: ANN401
        """Take down each request's blocks, of each group, as the runner does.

        It hears of new blocks, not of those that were given up: what a state is copied from may be.
        """
        for new in decided.scheduled_new_reqs:
            self._tables[new.req_id] = tuple(map(list, new.block_ids))
        cached = decided.scheduled_cached_reqs
        for req_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if req_id in cached.resumed_req_ids:
                self._tables[req_id] = tuple(map(list, blocks))
            else:
                for table, more in zip(self._tables[req_id], blocks or (), strict=False):
                    table += more

    def _table(self, req_id: str) -> tuple[list[int], ...]:
        """A request's blocks, of each group.

        What the scheduler has given up of attention is left out: who looks there has gone wrong.
        """
        held = self.scheduler.kv_cache_manager.get_block_ids(req_id)
        states = self.ranks[0].cells.states if self.shape.states else ()
        return tuple(
            list(table)
            if group in states
            else [block if kept else kept for block, kept in zip(table, blocks, strict=True)]
            for group, (table, blocks) in enumerate(zip(self._tables[req_id], held, strict=True))
        )

    def _in_flight(self, req_id: str, end: int) -> Work | None:
        """The part of a step whose output is not there, of a request of which it computes to `end`.

        One that was preempted since begins anew, and what is in flight says nothing about it.
        """
        for work in self.steps[0].work if self.steps else ():
            if (work.req_id, work.end - work.late + len(work.guesses)) == (req_id, end):
                return work
        return None

    def _execute(self, rank: Rank, decided: Any) -> KVConnectorOutput:  # noqa: ANN401
        """A rank's part of a step but for the model."""
        metadata = decided.kv_connector_metadata
        if len(self.ranks) > 1:  # it is sent to another process
            with self.around.clock.at(Place(self.name)):
                sent = pickle.dumps(metadata)
            with self.around.clock.at(rank.place):
                metadata = pickle.loads(sent)  # noqa: S301 - our own
        mine = copy.copy(decided)
        mine.kv_connector_metadata = metadata
        with (
            self.around.clock.at(rank.place),
            mock.patch.multiple(
                runner,
                get_kv_transfer_group=lambda: rank.connector,
                get_forward_context=lambda: None,
            ),
        ):
            try:
                with runner.KVConnectorModelRunnerMixin._get_kv_connector_output(mine) as report:
                    pass
            except Exception as error:
                raise DiedError(self.name, f"the worker of rank {rank.place.rank}") from error
        return report

    def compute(self) -> None:
        """Let the model run the oldest step that it has not run."""
        step = next((s for s in reversed(self.steps) if s.tokens is None), None)
        if step is None:
            return
        step.tokens = {}
        for copied in getattr(step.decided, "kv_cache_block_copies", None) or ():
            for rank in self.ranks:
                rank.cells.copy(copied.src_block_id, copied.dst_block_id)
        for work in step.work:
            self._copy_states(work, self._slots.begin(work.req_id, work.span, fresh=work.fresh))
        for work in step.work:
            start, end = work.start - work.late, work.end - work.late
            sound = self._attend(work, start)
            text = self.around.text_of(work.req_id)
            right = self._right(work, text, end) if sound else 0
            work.rejected = len(work.guesses) - right
            kv = text.kv(start, end + len(work.guesses))
            first = len(kv) - work.rejected if sound else 0
            kv[first:] = ~kv[first:]  # of other tokens, or made of them
            written = self._slots.written(work.req_id, work.span) + self._exported(work.span)
            for rank in self.ranks:
                for group, table in enumerate(work.tables):
                    if group in rank.cells.states:
                        for slot, position in written:
                            rank.cells.write_state(group, table[slot], kv[position - start])
                    else:
                        rank.cells.write(group, table, start, kv)
            self._copy_states(work, self._slots.judge(work.req_id, work.span, right))
            if work.samples:
                last = end + right
                tokens = [text.token(position) for position in range(end, last + 1)]
                step.tokens[work.req_id] = tokens if sound else [WRONG]
                if self.shape.guesses:
                    self._guessed[work.req_id] = self._guess(text, last + 1)
        if step.work:
            self.around.note(self.name, "the model has run")

    def _exported(self, span: Span) -> list[tuple[int, int]]:
        """The slot of a state that a step exports, and the position of the token after which it is;
        none, or one."""
        shape = self.shape
        if not shape.exports:
            return []
        tokens = kv_cache_interface.get_mamba_prefill_checkpoint_position(
            span.end, shape.hash_tokens, bool(shape.lookahead)
        )
        valid = kv_cache_interface.is_mamba_prefill_checkpoint_valid(
            span.start, span.end, tokens, shape.hash_tokens, shape.state_tokens, 1
        )
        return [((span.end - 1) // shape.state_tokens - 1, tokens - 1)] if valid else []

    def _copy_states(self, work: Work, moves: list[tuple[int, int]]) -> None:
        for rank in self.ranks:
            for group in rank.cells.states:
                table = work.tables[group]
                for source, target in moves:
                    rank.cells.copy_state(group, table[source], table[target])

    def _right(self, work: Work, text: Text, start: int) -> int:
        """How many of the guesses from `start` on are right before the first that is not."""
        known = self._guessed.pop(work.req_id, [])
        guesses = [
            known[i] if g == -1 and i < len(known) else g for i, g in enumerate(work.guesses)
        ]
        wrong = (i for i, guess in enumerate(guesses) if guess != text.token(start + i))
        return next(wrong, len(guesses))

    def _guess(self, text: Text, start: int) -> list[int]:
        """Guess the tokens from a position on; how many are right hangs on the text before."""
        right = int(text.kv(start - 1, start)[0]) % (self.shape.lookahead + 1)
        tokens = [text.token(start + i) for i in range(self.shape.lookahead)]
        return [token if i < right else 0 for i, token in enumerate(tokens)]

    def _attend(self, work: Work, start: int) -> bool:
        """Whether the KV before the step's tokens is right, at all ranks."""
        text = self.around.text_of(work.req_id)
        for rank in self.ranks:
            for group, table in enumerate(work.tables):
                if group in rank.cells.states:
                    first = max(0, start - 1)
                else:
                    window = rank.cells.windows[group] - (not self.shape.edge)
                    first = int(max(0, start + 1 - window))
                if first >= start:
                    continue
                kv = text.kv(first, start)
                if group in rank.cells.states:
                    block = table[self._slots.read(work.req_id, work.span)]
                    wrong = rank.cells.wrong_state(group, block, first, kv)
                else:
                    wrong = rank.cells.wrong(group, table, first, kv)
                if wrong is not None:
                    position, block, found = wrong
                    self.wrong.setdefault(
                        work.req_id, f"position {position} in block {block} holds {found:#x}"
                    )
                    self.around.note(self.name, f"{work.req_id}: {self.wrong[work.req_id]}")
                    return False
        return True

    def _output(self, step: Step) -> None:
        outputs = [
            ModelRunnerOutput(
                req_ids=[work.req_id for work in step.work],
                req_id_to_index={work.req_id: i for i, work in enumerate(step.work)},
                sampled_token_ids=[(step.tokens or {}).get(w.req_id, []) for w in step.work],
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=None,
                kv_connector_output=report,
            )
            for report in step.reports
        ]
        output: Any = outputs[0]
        if len(outputs) > 1:
            output = self._aggregator.aggregate(list(outputs))
        report = output.kv_connector_output
        self._note_report(report)
        said = self._enter("update", self.scheduler.update_from_output, step.decided, output)
        if self.shape.guesses and not self.shape.asynchronous:
            sampled = [req_id for req_id in step.tokens or () if req_id in self._guessed]
            guessed = DraftTokenIds(sampled, [self._guessed[req_id] for req_id in sampled])
            self._enter("guesses", self.scheduler.update_draft_token_ids, guessed)
        for each in (one for client in said.values() for one in client.outputs):
            finish = None if each.finish_reason is None else str(each.finish_reason)
            self._told.append(
                Told(each.request_id, each.new_token_ids, finish, each.kv_transfer_params)
            )

    def _note_report(self, report: KVConnectorOutput | None) -> None:
        if report is None:
            return
        for req_id in sorted(report.finished_recving or ()):
            self.reported[req_id] += 1
        words = {
            "sent": report.finished_sending,
            "received": report.finished_recving,
            "invalid": report.invalid_block_ids,
        }
        said = "; ".join(f"{k} {sorted(v)}" for k, v in words.items() if v)
        if said:
            self.around.note(self.name, f"hears: {said}")

    # For whoever watches.

    def blocks_of(self, req_id: str) -> set[int]:
        """The blocks that a request holds, of all groups; none if it is not known."""
        groups = self.scheduler.kv_cache_manager.get_block_ids(req_id)
        return {block for group in groups for block in group}

    def holders(self, block: int) -> list[str]:
        """The requests that hold a block."""
        return [r for r in self.scheduler.requests if block in self.blocks_of(r)]

    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    @property
    def busy(self) -> bool:
        return bool(self.core.has_work())


class _Input:
    """The input queue of an engine core, which is always empty: requests are added between steps.

    A wait with an end is over at once the first time, and the core looks at what it wants to.
    """

    def __init__(self) -> None:
        self._waited = False

    def empty(self) -> bool:
        return True

    def get(self, block: bool = True, timeout: float | None = None) -> Any:  # noqa: ANN401
        if not block:
            raise queue.Empty
        if timeout is None or self._waited:
            self._waited = False
            raise _IdleError
        self._waited = True
        raise queue.Empty


class RejectedError(ValueError):
    """What a handler raises; the client gets a 400."""


async def _refuse() -> None:
    raise RejectedError("the prompt is too long")


class _Client(AsyncLLM):  # type: ignore[misc, unused-ignore]
    """The API server's side of an engine, without its processes."""

    def __init__(self, engine: Engine) -> None:
        self.vllm_config = engine.ranks[0].worker.vllm_config
        self.engine_core: Any = SimpleNamespace(add_request_async=engine.take)

    def __del__(self) -> None:
        pass


def _module_of(thing: object) -> object:
    """The module in which a connector's scheduler side finds the names of its listener."""
    for kind in type(thing).__mro__:
        if "_nixl_handshake_listener" in vars(kind):
            return sys.modules[kind.__module__]
    return sys.modules[NixlConnectorScheduler.__module__]

"""D's engine core: its scheduler, its worker, its loop, what P sees of them, and what P keeps."""

from __future__ import annotations

import asyncio
import copy
import itertools
import queue
import resource
import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import zmq
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import RequestStatus

from tests.parity.retries import COMPLETIONS, good_body
from tests.parity.scenario import LeftOutError, Observed, at_least, said, scenario
from tests.parity.visits import serving
from tests.support import decode_engine, nixl_worker
from tests.support.decode_engine import DecodeEngine
from tests.support.hybrid_engine import engine_of
from tests.support.idle_engine import IdleEngine
from tests.support.lease_pair import computed_of, decode_server, prefill_server
from tests.support.nixl_release import GET_META_MSG, NixlAgentMetadata
from tests.support.nixl_worker import (
    STAGES,
    EngineDiedError,
    await_handshakes,
    connect,
    hold,
    make_worker,
    nixl_of,
    receive,
    register_peer,
    script_handshake,
    sent,
    step,
)
from tests.support.overlapped_engine import OverlappedEngine
from tests.support.ray_actors import HOST, Node, actors, announced, nixl_part
from tests.support.release import since
from tests.support.serving_app import REMOTE
from tests.support.stand_in_model import HEAD_SIZE

LENGTHS = (1, 15, 16, 17, 40, 64, 80)
"""Tokens of a prompt: within, at the end of and across blocks of 16."""


def _blocks(group: str, tokens: int, size: int = 16, *, alone: bool = False) -> list[int]:
    """What P hands out for a prompt: all blocks, those of the window, or the state's."""
    blocks = [*range(1, -(-tokens // size) + 1)]
    if alone:  # one group is never cut
        return blocks
    return {"full": blocks, "sliding": blocks[-3:], "mamba": blocks[-1:]}[group]


def _life(engine: DecodeEngine, req_id: str, tokens: int, blocks: list[list[int]]) -> Observed:
    """A request from its arrival to its end: what is read, computed, and told."""
    nixl = nixl_of(engine.worker)
    before, heard = len(nixl.reads), {k: len(v) for k, v in nixl.heard.items()}
    engine.ask(req_id, range(1000, 1000 + tokens), remote_blocks=blocks)
    steps: list[Observed] = []
    for _ in range(8):
        step = engine.step()
        nixl.finish(*nixl.in_flight())
        steps.append({"computed": list(step.computed.get(req_id, ())), "ends": step.finished})
        if step.finished:
            break
    reads = nixl.reads[before:]
    return {
        "steps": steps,
        "read": [[one.agent, one.local, one.remote] for one in reads],
        "told": [word.decode() for k, v in nixl.heard.items() for word in v[heard.get(k, 0) :]],
        "misuse": nixl.misuse,
    }


KINDS = ("full", "full, sliding", "full, mamba", "sliding")


def _prefilled(groups: Sequence[str], tokens: int) -> int:
    """How many of a prompt's tokens P computes: a state goes over before the last one, from 0.19 on
    (`_truncate_mamba_request_for_prefill`), as D computes that from it."""
    return max(1, tokens - 1) if "mamba" in groups and since("0.19.0") else tokens


@scenario(*KINDS)
def receives(kind: str) -> Observed:
    """Prompts of many lengths, one after the other, all of whose blocks P has."""
    groups: Any = tuple(kind.split(", "))
    observed = {}
    for tokens in LENGTHS:
        engine = DecodeEngine(groups=groups)
        connect(engine.worker, "P")
        there = _prefilled(groups, tokens)
        blocks = [_blocks(group, there, alone=len(groups) == 1) for group in groups]
        try:
            observed[f"{tokens} tokens"] = _life(engine, f"req-{tokens}", tokens, blocks)
        except EngineDiedError as error:
            observed[f"{tokens} tokens"] = said(error)
    return observed


def _received(worker: Any, tp_size: int = 1) -> Observed:  # noqa: ANN401 - of any release
    connect(worker, "P", tp_size)
    receive(worker, local_blocks=[[1, 2]], remote_blocks=[[5, 6]], tp_size=tp_size)
    nixl = nixl_of(worker)
    nixl.finish(*nixl.in_flight())
    return {
        "read": [[one.agent, one.local, one.remote] for one in nixl.reads],
        "finished": [sorted(part) for part in decode_engine.finished(worker).values() if part],
        "told": {agent: [word.decode() for word in words] for agent, words in nixl.heard.items()},
    }


@scenario("latent, 1", "heads, 1", "heads, 2")
def a_worker_receives(variant: str) -> Observed:
    """The worker alone, with one and two ranks at P."""
    kind, tp_size = variant.split(", ")
    return _received(make_worker(mla=kind == "latent"), int(tp_size))


@scenario(shows={"40449": "P's rank that is skipped hears D's name of the request"})
def a_worker_receives_a_latent_cache_of_two_ranks() -> Observed:
    """Both ranks of P have the whole cache; one is read, the other told."""
    return _received(make_worker(mla=True), tp_size=2)


@scenario("its constructor", "its reads")
def a_plugins_worker_receives(what: str) -> Observed:
    """Plugins for other hardware put methods of theirs in the place of upstream's."""
    worker: Any = make_worker()
    if what == "its constructor":
        made, worker = worker, object.__new__(type(worker))
        for name, value in vars(made).items():  # all that upstream's makes, of whatever class
            if name[0] != "_" or not type(value).__module__.startswith("vllm_overlay"):
                vars(worker)[name] = value
        return _received(worker)
    failed = getattr(worker, "_failed_recv_reqs", None)
    if failed is None:
        raise LeftOutError("this release's worker has no _failed_recv_reqs")
    note = failed.add if isinstance(failed, set) else failed.put
    worker._read_blocks_for_req = lambda req_id, meta: note(req_id)
    return _received(worker)


# ---------------------------------------------------------------- handshakes

RANKS = [0] * (1 + STAGES)
ASKED = {
    "a handshake": [b"", [GET_META_MSG, *RANKS]],
    "something in between": [b"a question", [GET_META_MSG, *RANKS]],
    "another kind": [b"", [b"get_more", *RANKS]],
    "no kind": [b"", [None, *RANKS]],
    "a rank in other words": [b"", [GET_META_MSG, *map(bool, RANKS)]],
}


@scenario(*ASKED)
def the_side_channel_is_asked(what: str) -> Observed:
    """Twice, by a peer that nothing is known of."""
    between, asked = ASKED[what]
    answers = []
    with prefill_server() as p, zmq.Context() as context:
        said = msgspec.msgpack.encode(p.worker.xfer_handshake_metadata)
        with context.socket(zmq.DEALER) as peer:
            peer.connect(f"tcp://127.0.0.1:{p.part.side_channel_port}")
            for _ in range(2):
                peer.send_multipart([between, msgspec.msgpack.encode(asked)])
                came = peer.recv_multipart() if peer.poll(5000) else []
                answers.append([len(came), said in came])
    return {"frames, and whether P's metadata is one": answers}


# ---------------------------------------------------------------- blocks of several sizes


def _spec(kind: str, mla: bool, block_size: int, heads: int, state_tokens: int) -> Any:  # noqa: ANN401
    """Pages of one size: the second kind of layer has half the heads, and blocks twice as long."""
    wide = kind == "sliding"  # any name that stands for the second kind
    return FullAttentionSpec(
        block_size=block_size * (2 if wide else 1),
        num_kv_heads=heads // (2 if wide else 1),
        head_size=HEAD_SIZE,
        dtype=nixl_worker.DTYPE,
    )


@scenario(*map(str, LENGTHS))
def receives_into_blocks_of_two_sizes(tokens: str) -> Observed:
    """Layers of two kinds whose pages are made equal, as Gemma 4 has them; scheduler's part."""
    with mock.patch.object(nixl_worker, "_spec", _spec):
        try:
            engine = DecodeEngine(groups=("full", "sliding"))
        except Exception as error:
            raise LeftOutError(f"this release builds no such engine: {said(error)}") from error
    connect(engine.worker, "P")
    count = int(tokens)
    blocks = [_blocks("full", count, 16), _blocks("full", count, 32)]
    engine.ask("req", range(1000, 1000 + count), remote_blocks=blocks)
    decided = engine.scheduler.schedule()
    asked = decided.kv_connector_metadata.reqs_to_recv
    return {
        "computed": decided.num_scheduled_tokens,
        "to be read": {
            req_id: [[len(ids) for ids in meta.local_block_ids], _remote(meta)]
            for req_id, meta in asked.items()
        },
        "the worker": _worker_takes(engine, decided),
    }


def _remote(meta: Any) -> Observed:  # noqa: ANN401 - upstream's ReqMeta
    return [list(ids) for ids in meta.remote.block_ids] if meta.remote else None


def _worker_takes(engine: DecodeEngine, decided: SchedulerOutput) -> Observed:
    try:
        engine._start(decided)
    except Exception as error:
        return said(error)
    return [[len(one.local), one.remote] for one in nixl_of(engine.worker).reads]


# ---------------------------------------------------------------- P refused, P restarted


def _field(**fields: Any) -> dict[str, Any]:  # noqa: ANN401 - any field of the metadata
    known = NixlAgentMetadata.__dataclass_fields__
    return {name: value for name, value in fields.items() if name in known}


REFUSED_PEERS: dict[str, Any] = {
    "other layout": lambda worker: {"kv_cache_layout": "NHD"},
    "other lengths": lambda worker: {"block_lens": [n + 1 for n in worker.block_len_per_layer]},
    "fewer regions": lambda worker: {"block_lens": worker.block_len_per_layer[:1]},
}


def _refused_and_back(variant: str, **changed: Any) -> Observed:  # noqa: ANN401
    """Refuse a peer with the fields `changed`, welcome it without, and read from it."""
    what, kind = variant.split("; ")
    groups: Any = tuple(kind.split(", "))
    worker = make_worker(groups=groups, block_size=16, kernel_block_size=4)
    observed: dict[str, Observed] = {}
    for name, changes in (("first", REFUSED_PEERS[what](worker) | changed), ("again", {})):
        try:
            connect(worker, "P", **changes)
            observed[name] = "welcome"
        except Exception as error:
            observed[name] = f"refused: {type(error).__name__}" if name == "again" else "refused"
    blocks = [[1, 2] if group == "full" else [2] for group in groups]
    try:
        receive(worker, local_blocks=blocks, remote_blocks=blocks)
        observed["read"] = [[len(one.local), one.remote] for one in nixl_of(worker).reads]
    except Exception as error:
        observed["read"] = said(error)
    return observed


_RESTARTS = (
    *(f"{what}; full" for what in REFUSED_PEERS),
    *(f"{what}; full, mamba" for what in ("other layout", "fewer regions")),
)


@scenario(*_RESTARTS)
def p_is_refused_and_comes_back(variant: str) -> Observed:
    """A handshake is refused; P is started again under its name with what D asked for."""
    return _refused_and_back(variant)


@scenario(*_RESTARTS, shows={"42097 >=0.21.0": "the refused P's ratio is used for the next one"})
def p_is_refused_and_comes_back_with_another_ratio(variant: str) -> Observed:
    """As before, and P's logical blocks are of another size than before."""
    return _refused_and_back(variant, **_field(physical_blocks_per_logical_kv_block=2))


# ---------------------------------------------------------------- the loop of the engine core


class _StopError(Exception):
    pass


class Loop(EngineCoreProc):  # type: ignore[misc, unused-ignore]
    """The engine core's own loop around an `IdleEngine`, without processes and sockets."""

    def __init__(self, engine: IdleEngine) -> None:
        self.engine, self.scheduler = engine, engine.scheduler
        self.vllm_config = engine.worker.vllm_config
        self.input_queue: queue.Queue[Any] = queue.Queue()
        self.output_queue: queue.Queue[Any] = queue.Queue()
        self.aborts_queue: queue.Queue[Any] = queue.Queue()
        self.engines_running = False
        self.batch_queue = None
        self.process_input_queue_block = True
        self.model_executor: Any = SimpleNamespace(is_sleeping=False)
        self._idle_state_callbacks: list[Any] = []
        from vllm.v1.engine import core

        self.shutdown_state = core.EngineShutdownState.RUNNING
        self.steps, self.waits, self.busy = 0, 0, 0.0

    def step_fn(self) -> tuple[dict[int, Any], bool]:
        if not self.scheduler.has_requests():
            return {}, False
        self.steps += 1
        computed = self.engine.step().computed
        nixl = nixl_of(self.engine.worker)
        nixl.finish(*nixl.in_flight())
        return {}, bool(computed)

    def post_step(self, model_executed: bool) -> None:
        pass

    def _handle_client_request(self, kind: str, payload: Any) -> None:  # noqa: ANN401
        if kind == "stop":
            raise _StopError
        if kind == "abort":
            self.engine.abort(payload)
        elif kind == "do":
            payload()
        else:
            self.engine.add(payload)

    def watch(self, seconds: float) -> None:
        """Let the loop run; note the share of a core that it takes, and how often it waits."""
        timer = threading.Timer(seconds, self.input_queue.put, (("stop", None),))
        timer.start()
        began, cpu = time.perf_counter(), time.thread_time()
        waits = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        try:
            while True:
                self._process_input_queue()
                self._process_engine_step()
        except _StopError:
            self.busy = (time.thread_time() - cpu) / (time.perf_counter() - began)
            self.waits = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - waits
        finally:
            timer.cancel()

    @property
    def rests(self) -> bool:
        """Whether it leaves the core to others. On a busy machine a loop that spins does not get
        much of it either, but it never waits."""
        return self.steps < 50 or (self.busy < 0.25 and 2 * self.waits > self.steps)


def _refused_requests(*hosts: str) -> list[EngineCoreRequest]:
    """What an API server sends for a request of each of `hosts` that it refuses, and a good one
    for the last."""

    async def visits() -> list[EngineCoreRequest]:
        async with serving() as server:
            for host in hosts:
                params = copy.deepcopy(REMOTE) | {
                    "remote_engine_id": host,
                    "remote_host": host,
                    "remote_request_id": f"req-of-{host}",
                }
                wrong = {} if host == "P" else {"model": "no-such-model"}
                await server.post(COMPLETIONS, good_body(COMPLETIONS, params) | wrong)
            await asyncio.sleep(0.05)
            return list(server.core.requests)

    return asyncio.run(visits())


_HANGS = 1.5  # seconds that a handshake with a host that does not answer takes


def _hanging(engine: IdleEngine) -> None:
    """Let every handshake but P's hang and then fail."""

    def handshake(engine_id: str, tp_size: int) -> dict[Any, str]:
        if engine_id != "P":
            time.sleep(_HANGS)
            raise TimeoutError(engine_id)
        return register_peer(engine.worker, engine_id, tp_size)

    script_handshake(engine.worker, handshake)


@scenario("one", "three")
def a_refused_requests_peer_hangs(count: str) -> Observed:
    """An engine with nothing to compute: it rests, or looks now and then, and does not spin."""
    hosts = [f"hangs-{i}" for i in range({"one": 1, "three": 3}[count])]
    engine = IdleEngine()
    _hanging(engine)
    loop = Loop(engine)
    for request in _refused_requests(*hosts):
        loop.input_queue.put(("add", request))
    loop.watch(1.2)
    return at_least(["it rests"] if loop.rests else [])


@scenario()
def a_good_request_comes_after_refused_ones() -> Observed:
    """Twelve hosts do not answer; the request of P, which nobody has met, is read at once."""
    engine = IdleEngine()
    _hanging(engine)
    loop = Loop(engine)
    for request in _refused_requests(*(f"hangs-{i}" for i in range(12)), "P"):
        loop.input_queue.put(("add", request))
    loop.watch(4.0)
    read = any(one.agent.startswith("P/") for one in nixl_of(engine.worker).reads)
    return at_least(["read within four seconds"] if read else [])


@scenario()
def a_request_leaves_while_its_peer_hangs() -> Observed:
    """Aborted before anything was read; the engine has nothing else to do."""
    engine = IdleEngine()
    _hanging(engine)
    loop = Loop(engine)
    engine.ask("req", range(40), remote_blocks=[[5, 6, 7]], engine_id="hangs")
    engine.abort("req")
    loop.watch(1.0)
    return at_least(["it rests"] if loop.rests else [])


@scenario()
def a_request_waits_for_its_peer() -> Observed:
    """The handshake takes a while and works: the loop polls no harder than stock's, then reads."""
    engine = IdleEngine()

    def handshake(engine_id: str, tp_size: int) -> dict[Any, str]:
        time.sleep(0.6)
        return register_peer(engine.worker, engine_id, tp_size)

    script_handshake(engine.worker, handshake)
    loop = Loop(engine)
    engine.ask("req", range(40), remote_blocks=[[5, 6, 7]])
    loop.watch(1.5)
    return {
        "read": [one.remote for one in nixl_of(engine.worker).reads],
        "done": "req" not in engine.scheduler.requests,
        "polls": at_least(["at most a thousand times a second"] if loop.steps < 1500 else []),
    }


@scenario(shows={"40364 <0.22": "the engine dies of the peer that it does not know"})
def a_handshake_fails_and_the_prompt_is_computed() -> Observed:
    """Or, on releases that do so, the request ends with an error: as stock."""
    engine = IdleEngine()

    def handshake(engine_id: str, tp_size: int) -> dict[Any, str]:
        time.sleep(0.05)
        raise ConnectionError("nobody there")

    script_handshake(engine.worker, handshake)
    engine.ask("req", range(40), remote_blocks=[[5, 6, 7]])
    computed: list[tuple[int, int]] = []
    ends: dict[str, str] = {}
    for _ in range(400):
        step = engine.step()
        computed += [step.computed[req] for req in step.computed]
        ends |= step.finished
        if ends:
            break
        time.sleep(0.005)
    return {"computed": [list(one) for one in computed], "ends": ends}


# ---------------------------------------------------------------- failed reads, clients that leave


@scenario("one rank", "two ranks")
def p_hears_of_a_request_that_failed_with_its_read(ranks: str) -> Observed:
    """Its client was answered with 500: another D may be asked for the same, and P keeps it."""
    count = ["one rank", "two ranks"].index(ranks) + 1
    worker = make_worker(policy="fail")
    connect(worker, "P", tp_size=count)
    nixl = nixl_of(worker)
    receive(worker, tp_size=count)
    nixl.fail(nixl.reads[0])
    nixl.finish(*nixl.in_flight())
    received = [sorted(step(worker)[1]) for _ in range(3)]
    told = {agent: [word.decode() for word in words] for agent, words in nixl.heard.items()}
    return {"received": received, "told": {name: told[name] for name in sorted(told) if told[name]}}


@scenario()
def a_p_that_is_gone_keeps_no_other_waiting() -> Observed:
    """D is connected with it. What is read from it fails, and nobody shakes hands with it."""
    worker = make_worker()
    connect(worker, "P")
    nixl, asked = nixl_of(worker), []

    def answer(engine_id: str, tp_size: int) -> dict[Any, str]:
        asked.append(engine_id)
        return register_peer(worker, engine_id, tp_size)

    script_handshake(worker, answer)
    reported = []
    for number in range(1, 5):
        receive(worker, f"of P {number}", local_blocks=[[number]], remote_blocks=[[number]])
        for _ in range(200):
            nixl.fail(*nixl.in_flight())
            if received := step(worker)[1]:
                break
            time.sleep(0.01)  # where P is tried, on another thread
        reported += sorted(received)
    receive(worker, "of Q", local_blocks=[[5]], remote_blocks=[[5]], engine_id="Q")
    await_handshakes(worker)
    step(worker)
    nixl.finish(*nixl.in_flight())
    reported += sorted(step(worker)[1])
    lost = sorted(worker.get_block_ids_with_load_errors())
    return {"reported": reported, "lost": lost, "asked": asked, "reads": len(nixl.reads)}


def _leaves_while_its_read_fails(
    engine: DecodeEngine, advance: Callable[[], object], moment: int, *, parts: bool
) -> Observed:
    """The read of `left` fails at the first report; its client leaves in the `moment`-th.

    Args:
        engine: with the policy fail.
        advance: takes a step, or ends one and takes another.
        moment: which report its client leaves in, between the step's decision and its output.
        parts: whether a rank says first that blocks failed, and the last one a report later
            that the read is over, as the ranks of an engine do.
    """
    connect(engine.worker, "P")
    nixl = nixl_of(engine.worker)
    told: Callable[[], Any] = engine._report
    later: dict[str, Any] = {"finished_recving": None, "failed_recving": set()}
    reports = itertools.count()

    def report() -> Any:  # noqa: ANN401 - KVConnectorOutput
        for read in nixl.in_flight():
            (nixl.fail if b"left" in read.notif else nixl.finish)(read)
        said = told()
        if parts:
            for name in later.keys() & vars(said).keys():  # from 0.30.0 on both
                over = getattr(said, name)
                setattr(said, name, later[name])
                later[name] = over
        if next(reports) == moment:
            engine.scheduler.finish_requests("left", RequestStatus.FINISHED_ABORTED)
        return said

    engine.ask("left", range(100, 140), [[5, 6, 7]])
    engine.ask("loads", range(200, 240), [[8, 9, 10]])
    engine.ask("computes", range(300, 340), max_tokens=12)
    with mock.patch.object(engine, "_report", report):
        try:
            for _ in range(24):
                advance()
        except EngineDiedError as error:
            return said(error)
    return [sorted(engine.scheduler.requests), len(engine._reusable()), nixl.misuse]


@scenario("alone", "overlapping")
def a_client_leaves_while_its_read_fails(steps: str) -> Observed:
    """With the policy fail, at any time; the steps of the engine are each alone, or overlap."""
    observed = {}
    for moment, parts in itertools.product(range(6), (False, True)):
        engine: DecodeEngine
        advance: Callable[[], object]
        if steps == "alone":
            engine = DecodeEngine(policy="fail")
            advance = engine.step
        else:
            engine = OverlappedEngine(policy="fail")
            advance = engine.advance
        with mock.patch.object(OverlappedEngine, "_land"):  # `report` lets reads end
            observed[f"{moment}, in parts: {parts}"] = _leaves_while_its_read_fails(
                engine, advance, moment, parts=parts
            )
    return observed


@scenario("no connector", "no overlap", "room for all")
def three_share_a_small_cache(variant: str) -> Observed:
    """What each step computes; but for the last, who is short of blocks preempts who came last."""
    engine = OverlappedEngine(
        num_blocks=40 if variant == "room for all" else 8,
        connected=variant != "no connector",
        depth=1 if variant == "no overlap" else 2,
        scheduler=Scheduler if variant == "no overlap" else AsyncScheduler,
    )
    for number in range(3):
        engine.ask(f"req-{number}", range(100 * number, 100 * number + 30), max_tokens=24)
    steps: list[Observed] = []
    while (engine.steps or engine.scheduler.has_requests()) and len(steps) < 200:
        decided = engine.advance()
        steps.append(decided and dict(decided.num_scheduled_tokens))
    return [steps, engine.finished]


@scenario("blocks", "state", "both")
def d_has_part_of_a_hybrids_prompt(what: str) -> Observed:
    """It has the blocks of the prompt's beginning, or some and the state after it, or all of it."""
    if not since("0.24.0"):
        raise LeftOutError("each group is looked up by itself from 0.24.0 on")
    engine = engine_of(DecodeEngine, mode="align", num_blocks=10, prefix_caching=True)
    connect(engine.worker, "P")
    engine.ask("earlier", range(1000, 1064), max_tokens=1)
    engine.step()
    if what == "state":  # takes the last blocks of `earlier`, and leaves its state
        engine.ask("other", range(64), max_tokens=1)
        engine.step()
    engine.step()  # nobody runs
    tokens = 40 if what == "blocks" else 80
    blocks = [_blocks(group, tokens - 1) for group in ("full", "mamba")]
    return _life(engine, "req-d", tokens, blocks)


# ---------------------------------------------------------------- what P keeps for D


def _prefill(engine: IdleEngine) -> None:
    """A request whose prompt P computes, and whose blocks it then keeps for D."""
    engine.send("req-p", range(40), {"do_remote_decode": True}, max_tokens=1)


def _kept(engine: IdleEngine) -> Observed:
    return [sorted(engine.scheduler.requests), len(engine._reusable())]


@scenario("read", "nobody reads it")
def an_idle_p_keeps_what_d_may_read(variant: str) -> Observed:
    """Then a request comes: it is served at once, and what D has read meanwhile is free."""
    engine = IdleEngine()
    loop = Loop(engine)
    loop.input_queue.put(("do", lambda: _prefill(engine)))
    loop.watch(0.6)
    observed = {"idle": _kept(engine)}
    if variant == "read":
        nixl_of(engine.worker).inbox = {"D/0": [b"req-p:1"]}
    loop.input_queue.put(("do", lambda: engine.ask("next", range(100, 120))))
    loop.watch(0.6)
    return observed | {"after the next request": _kept(engine)}


@scenario(shows={"43433": "the blocks stay until the next request comes"})
def an_idle_p_frees_what_d_has_read() -> Observed:
    """No request comes after it."""
    engine = IdleEngine()
    loop = Loop(engine)
    loop.input_queue.put(("do", lambda: _prefill(engine)))
    loop.watch(0.4)
    nixl_of(engine.worker).inbox = {"D/0": [b"req-p:1"]}
    loop.watch(1.2)
    return _kept(engine)


@scenario(shows={"43433": "the blocks stay until the next request comes"})
def an_idle_d_frees_what_was_received_for_nobody() -> Observed:
    """The client has left; the read ends when nothing else is left to do."""
    engine = IdleEngine()
    connect(engine.worker, "P")
    loop = Loop(engine)

    def come_and_leave() -> None:
        engine.ask("left", range(40), [[5, 6, 7]])
        engine.step()
        engine.abort("left")

    loop.input_queue.put(("do", come_and_leave))
    loop.watch(1.0)
    return _kept(engine)


@scenario()
def a_paused_engine_goes_on() -> Observed:
    """D is paused for longer than P's lease, and the reads that it had begun end meanwhile."""
    clock = time.monotonic
    with prefill_server() as p:
        d = decode_server()
        d.send("r", range(40), p.prefill("at-p", range(40)))
        d.step()
        nixl_of(d.worker).finish(*nixl_of(d.worker).in_flight())
        p.outlive_leases()
        with mock.patch.object(time, "monotonic", lambda: clock() + 10):
            computed, ends = 0, {}
            over = clock() + 5
            while d.scheduler.has_requests() and clock() < over:
                step = d.step()
                computed += computed_of([step], "r")
                ends.update(step.finished)
    return {"tokens that D has computed": computed, "ends": ends}


def _ending(*leases: tuple[str, float]) -> Observed:
    """Which leases of a P worker have ended: now, in a while, and once more."""
    worker = make_worker(engine_id="P")
    now = time.perf_counter()
    for req_id, seconds in leases:
        hold(worker, req_id, now + seconds)
    observed = []
    for pause in (0.0, 0.6, 0.0):
        time.sleep(pause)
        ended = sent(worker)
        observed.append(said(ended) if isinstance(ended, EngineDiedError) else sorted(ended))
    return observed


@scenario()
def leases_end_in_their_order() -> Observed:
    """Two that have run out, one that does soon, and one that lives."""
    return _ending(("a", -2.0), ("b", -1.0), ("c", 0.5), ("d", 60.0))


@scenario(shows={"K14": "those behind one that lives do not end"})
def leases_end_in_any_order() -> Observed:
    """As where D keeps some for a second turn."""
    if not since("0.22.0"):
        raise LeftOutError("leases of this release are all equally long")
    return _ending(("long", 60.0), ("a", -2.0), ("c", 0.5), ("d", 60.0), ("b", -1.0))


@scenario()
def actors_announce_hosts_of_their_nodes() -> Observed:
    """Engine cores that Ray runs: with a host at which each node can listen, or with none.

    From 0.22.0 on an actor does not take the server's.
    """
    observed: dict[str, Observed] = {}
    for server in ("127.0.0.1", "0.0.0.0", "localhost", None):  # noqa: S104
        for own in ("127.0.0.3", None):
            config = nixl_worker.make_vllm_config(engine_id="prefill")
            node = Node("127.0.0.2", {HOST: own} if own else {})
            hosts = []
            with actors(config, {HOST: server} if server else {}) as made:
                for actor in made:
                    with actor.on(node) as its:
                        hosts.append(announced(nixl_part(its))[0])
            observed[f"the server's {server}, the node's {own}"] = hosts
    return observed

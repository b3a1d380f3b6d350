"""Everything that can happen to a receive, in any order: a Hypothesis state machine.

A real worker (`tests.support.nixl_worker`) is asked to receive requests from prefill engines while
handshakes break off, NIXL refuses calls and reads end in errors. The machine knows what became
of each request from the scripted NIXL alone, and after every step holds the worker to this:

- nothing leaves `start_load_kv` or `get_finished` (an exception there ends the engine);
- each awaited receive is reported once, and none while one of its reads is in flight; an empty
  receive never; after a failure no further read is posted;
- the blocks of a receive that failed are reported invalid no later than the receive itself, and
  nobody else's are; it is never processed as if it had arrived, and one that arrived is;
- each rank of P hears of a request at most once, and exactly once when it is over, unless NIXL
  refused to carry the word or there never was a connection;
- a notification from a peer counts once, whatever else comes with it;
- the handshake thread leaves the main thread's state alone;
- when all is over, the worker remembers nothing.

`explore` runs it. What may go wrong (`faults`) and what is checked (`claims`) can be narrowed:
one fix alone keeps some of the promises, the whole set keeps all.
"""

from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from vllm.distributed.kv_transfer.kv_connector import utils

from tests.support.nixl_release import NixlConnectorMetadata, NixlConnectorWorker
from tests.support.nixl_worker import (
    EngineDiedError,
    GroupKind,
    Read,
    agent_name,
    handshake_result,
    hold,
    lives,
    make_worker,
    nixl_of,
    peer_metadata,
    rank_key,
    receive,
    target_ranks,
)
from tests.support.reaching import reaching_peers

_READERS_OF_A_RANK = hasattr(getattr(utils, "TransferTopology", None), "dcp_consumer_count")
"""D says how many of its ranks read a rank of P, not how many there are: from 0.29.0 on."""

Fault = Literal["handshake", "posting", "reading", "nonsense", "empty", "notifying", "releasing"]
"""What may go wrong: a handshake; NIXL refusing a read; a read ending in an error; a prompt that
cannot be P's; receives without blocks; notifications; what NIXL does besides."""

Claim = Literal["lives", "once", "invalid", "told", "thread", "forgotten"]
"""What is checked, in the order of the list above."""

FAULTS: tuple[Fault, ...] = (
    "handshake",
    "posting",
    "reading",
    "nonsense",
    "empty",
    "notifying",
    "releasing",
)
CLAIMS: tuple[Claim, ...] = ("lives", "once", "invalid", "told", "thread", "forgotten")

STEPS = 50
"""Steps of one example at most."""

_BLOCKS = 64
_ENGINES = ("P", "Q")
_IDS = ("a", "b", "c")
_REFUSALS: dict[str, Fault] = {
    "make_prepped_xfer": "posting",
    "transfer": "posting",
    "check_xfer_state": "reading",
    "get_xfer_telemetry": "releasing",
    "release_xfer_handle": "releasing",
    "send_notif": "notifying",
    "get_new_notifs": "notifying",
}
_OUTCOMES = (
    "connects",
    "connects",
    "breaks off before rank 0",
    "breaks off before rank 1",
    "is refused",
)
_NOISE = (b"", b"\xff:1", b"x", b"x:", b"x:0", b"x:-1", b"y:z")
_OWNED_BY_MAIN = (
    "_recving_metadata",
    "_recving_transfers",
    "_invalid_block_ids",
    "_reqs_to_send",
    "_reqs_to_process",
    "consumer_notification_counts_by_req",
)


class BrokenClaimError(Exception):
    """The worker does not hold to what it is held to; a test asserts on `broken_claim`."""


class BrokenError(RuntimeError):
    """What the scripted NIXL and the peers raise."""


@dataclass
class Asked:
    """One receive that the worker was asked for.

    `remote_id` is P's id for the request, new for each receive; `blocks` are ours, empty for a
    receive that nobody awaits. `failed`, `connected` and `strange` (no handshake for it came about)
    are what the machine knows to be true, from what it let NIXL and the peers do.
    """

    req_id: str
    remote_id: str
    engine: str
    blocks: frozenset[int]
    sensible: bool
    failed: bool = False
    connected: bool = False
    strange: bool = False
    invalid: frozenset[int] = frozenset()
    processed: int = 0
    reported: bool = False
    untold: set[str] = field(default_factory=set)


class _Handshakes:
    """Runs handshakes when the machine says, each on a thread of its own.

    What has no argument is no handshake, and marks a place in the line: nothing waits for it.
    """

    def __init__(self) -> None:
        self._pending: list[tuple[Future[Any], Callable[[], Any]]] = []
        self.at_once = False

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:  # noqa: ANN401
        future: Future[Any] = Future()
        if not args:
            future.set_result(None)
            return future
        self._pending.append((future, lambda: function(*args)))
        if self.at_once:  # it has ended before the worker looks again
            self.run()
        return future

    def shutdown(self, wait: bool = True) -> None:
        self._pending.clear()

    def __bool__(self) -> bool:
        return bool(self._pending)

    def run(self) -> None:
        """End the oldest handshake."""
        future, work = self._pending.pop(0)

        def end() -> None:
            try:
                result = work()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        if self.at_once:
            # Nobody waits for it yet, and this thread holds the worker's lock.
            end()
            return
        thread = threading.Thread(target=end)
        thread.start()
        thread.join()


class ReceiveMachine(RuleBasedStateMachine):
    """See the module; `explore` makes a subclass with the attributes below set."""

    faults: Collection[Fault] = FAULTS
    claims: Collection[Claim] = CLAIMS
    prepare: Callable[[NixlConnectorWorker], None] = staticmethod(lambda worker: None)

    @initialize(
        groups=st.sampled_from([("full",), ("full", "sliding")]),
        mla=st.booleans(),
        ranks=st.sampled_from([(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4)]),
    )
    def start(self, groups: tuple[GroupKind, ...], mla: bool, ranks: tuple[int, int]) -> None:
        self.d_tp, self.p_tp = ranks
        mla = mla and len(groups) == 1  # a latent cache is one group
        self.groups = groups
        self.worker = make_worker(
            groups=groups, mla=mla, tp_size=self.d_tp, tp_rank=self.d_tp - 1, num_blocks=_BLOCKS
        )
        self.prepare(self.worker)
        self.nixl = nixl_of(self.worker)
        self.handshakes = _Handshakes()
        vars(self.worker).update(
            _handshake_initiation_executor=self.handshakes,
            _nixl_handshake=self._handshake,
            use_host_buffer=True,
            sync_recved_kv_to_device=self._process,
        )
        self.asked: list[Asked] = []
        self.held: dict[str, bool] = {}  # P's side of the worker: request -> notified
        self.free = set(range(1, _BLOCKS))
        self.futile: list[Read] = []  # posted for a receive that had failed
        self.held_back: list[Read] = []  # failed, and may write until released after all
        self.outcome = "connects"
        self.refusals: dict[str, int] = {}  # call -> how many more calls succeed
        self.nixl.on.update({call: self._script(call) for call in _REFUSALS})

    # What the surroundings do.

    def _handshake(
        self,
        host: str,
        port: int,
        remote_tp_size: int,
        expected_engine_id: str,
        *sizes: int,  # of other kinds of parallelism
    ) -> Any:  # noqa: ANN401 - see handshake_result
        ranks = target_ranks(self.worker, remote_tp_size)
        agents = {}
        for i, rank in enumerate(ranks):
            if self.outcome == f"breaks off before rank {i}":  # the first, the second
                raise BrokenError("timed out")
            agents[rank_key(rank)] = self.worker.add_remote_agent(
                peer_metadata(self.worker, expected_engine_id, rank, remote_tp_size),
                rank,
                remote_tp_size,
            )
        if self.outcome != "connects":
            raise BrokenError("compatibility hash mismatch")
        return handshake_result(agents)

    def _script(self, call: str) -> Callable[..., None]:
        def script(*args: Any) -> None:  # noqa: ANN401 - whatever the call got
            if call == "transfer" and self._of(self._read(args[0]).notif).failed:
                self.futile.append(self._read(args[0]))
            if call not in self.refusals:
                return
            if call == "check_xfer_state" and self._read(args[0]).state != "PROC":
                return  # NIXL remembers how a read ended
            self.refusals[call] -= 1
            if self.refusals[call] >= 0:
                return
            del self.refusals[call]
            self._refused(call, args)
            raise BrokenError(call)

        return script

    def _refused(self, call: str, args: tuple[Any, ...]) -> None:
        """Note what it means that NIXL refuses this call."""
        if call == "make_prepped_xfer":
            self._of(args[3]).failed = True
        elif call == "transfer":
            self._of(self._read(args[0]).notif).failed = True
        elif call == "check_xfer_state":
            # NIXL raises for a status that is final.
            read = self._read(args[0])
            read.state = "ERR"
            self._of(read.notif).failed = True
        elif call == "release_xfer_handle":
            read = self._read(args[0])
            if read.state == "DONE":
                read.released = True  # kept by NIXL, not by the worker
            else:
                self.held_back.append(read)
        elif call == "send_notif":
            for asked in self._asked_as(args[1]):
                asked.untold.add(args[0])

    def _process(self, req_id: str, meta: Any) -> None:  # noqa: ANN401 - upstream's ReqMeta
        for asked in self.asked:
            if asked.remote_id == meta.remote.request_id:
                asked.processed += 1

    # What the machine knows.

    def _read(self, handle: int) -> Read:
        return next(read for read in self.nixl.reads if read.handle == handle)

    def _asked_as(self, notification: bytes) -> Iterator[Asked]:
        remote_id = notification.decode().rsplit(":", 1)[0]
        return (asked for asked in self.asked if asked.remote_id == remote_id)

    def _of(self, notification: bytes) -> Asked:
        return next(self._asked_as(notification))

    def _in_flight(self, asked: Asked) -> list[Read]:
        unreleased = [read for read in self.held_back if not read.released]
        flying = [*self.nixl.in_flight(), *unreleased]
        return [read for read in self._reads_of(asked) if read in flying]

    def _reads_of(self, asked: Asked) -> Iterator[Read]:
        return (read for read in self.nixl.reads if self._of(read.notif) is asked)

    def _awaited(self) -> list[Asked]:
        return [asked for asked in self.asked if asked.blocks and not asked.reported]

    def _claim(self, claim: Claim, truth: bool, otherwise: str) -> None:
        if claim in self.claims and not truth:
            raise BrokenClaimError(otherwise)

    # What happens.

    @rule(
        req_id=st.sampled_from(_IDS),
        engine=st.sampled_from(_ENGINES),
        count=st.sampled_from([2, 1, 2, 0]),
        sensible=st.sampled_from([True, True, False]),
        at_once=st.booleans(),
        tick=st.booleans(),
    )
    def ask(
        self, req_id: str, engine: str, count: int, sensible: bool, at_once: bool, tick: bool
    ) -> None:
        if not count and "empty" not in self.faults:
            count = 1
        if count and any(asked.req_id == req_id for asked in self._awaited()):
            return  # the scheduler knows an id once
        if len(self.free) < count * len(self.groups):
            return
        blocks = [[self.free.pop() for _ in range(count)] for _ in self.groups] if count else []
        asked = Asked(
            req_id,
            f"{req_id}{len(self.asked)}-at-{engine}",
            engine,
            frozenset(block for group in blocks for block in group),
            sensible or count < 2 or "nonsense" not in self.faults,
        )
        asked.failed = not asked.sensible
        asked.connected = engine in self.worker._remote_agents
        self.asked.append(asked)
        self.handshakes.at_once = at_once
        self._lives(
            receive,
            self.worker,
            req_id,
            local_blocks=blocks,
            remote_blocks=[[5, 6][: count or 1] if asked.sensible else [5] for _ in self.groups],
            remote_request_id=asked.remote_id,
            engine_id=engine,
            tp_size=self.p_tp,
        )
        self.handshakes.at_once = False
        self._after_handshakes()
        if tick:
            self.tick(handshake_between=False)

    @precondition(lambda self: self.handshakes)
    @rule(outcome=st.sampled_from(_OUTCOMES))
    def a_handshake_ends(self, outcome: str) -> None:
        if "handshake" in self.faults:
            self.outcome = outcome
        mine = {
            name: copy.copy(value)
            for name in _OWNED_BY_MAIN
            # What is a queue (from 0.22.0 on) is where threads may meet.
            if not isinstance(value := getattr(self.worker, name), queue.Queue)
        }
        stats = copy.deepcopy(self.worker.xfer_stats.data)
        self.handshakes.run()
        changed = [name for name, value in mine.items() if getattr(self.worker, name) != value]
        self._claim("thread", not changed, f"the handshake thread changed {changed}")
        self._claim("thread", stats == self.worker.xfer_stats.data, "it changed the statistics")
        self._after_handshakes()

    def _after_handshakes(self) -> None:
        """Note which receives found their peer, and which never will."""
        for asked in self.asked:
            refused = asked.failed and asked.sensible  # which says no more of its peer
            if refused or asked.strange or self._begun(asked):
                continue
            # A peer that was met may have to be met anew before this one's turn comes.
            asked.connected = asked.engine in self.worker._remote_agents
            waits = asked.connected or asked.engine in self.worker._handshake_futures
            asked.strange = not waits
            asked.failed |= asked.strange

    def _begun(self, asked: Asked) -> bool:
        """Whether it is over, was read for, or P was told: it needs no connection to be made."""
        heard = any(self._heard_of(asked).values()) or asked.untold
        return bool(asked.reported or heard or any(self._reads_of(asked)))

    @rule(call=st.sampled_from(sorted(_REFUSALS)), after=st.integers(0, 2))
    def nixl_will_refuse(self, call: str, after: int) -> None:
        if _REFUSALS[call] in self.faults:
            self.refusals[call] = after

    @precondition(lambda self: self.nixl.in_flight())
    @rule(which=st.integers(0, 7), well=st.booleans(), tick=st.booleans())
    def a_read_ends(self, which: int, well: bool, tick: bool) -> None:
        reads = self.nixl.in_flight()
        read = reads[which % len(reads)]
        if well or "reading" not in self.faults:
            self.nixl.finish(read)
        else:
            self.nixl.fail(read)
            self._of(read.notif).failed = True
        if tick:
            self.tick(handshake_between=False)

    @rule(
        req_id=st.sampled_from(["x", "y"]),
        noise=st.lists(st.sampled_from(_NOISE), max_size=2),
        first=st.booleans(),
    )
    def a_peer_notifies(self, req_id: str, noise: list[bytes], first: bool) -> None:
        words = noise if "notifying" in self.faults else []
        if req_id not in self.held:
            self._lives(hold, self.worker, req_id)
            self.held[req_id] = False
        elif not self.held[req_id]:
            self.held[req_id] = True
            good = [f"{req_id}:{self._readers(self.d_tp)}".encode()]
            words = good + words if first else words + good
        self.nixl.inbox.setdefault("D", []).extend(words)

    @rule(handshake_between=st.booleans())
    def tick(self, handshake_between: bool) -> None:
        self._lives(self.worker.start_load_kv, NixlConnectorMetadata())
        sent, received = self._lives(self.worker.get_finished)
        if handshake_between and self.handshakes:
            self.a_handshake_ends(self.outcome)
        invalid = self._lives(self.worker.get_block_ids_with_load_errors)
        self._heard_by_the_scheduler(sent, received, invalid)

    def _lives(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        try:
            return lives(call, *args, **kwargs)
        except EngineDiedError as died:
            self._claim("lives", False, str(died))
            return (set(), set()) if call == self.worker.get_finished else set()
        finally:
            # From K12 on another thread may have been given something to do.
            aside = vars(self.worker).get("_notifications")
            if aside is not None:
                aside._executor.submit(lambda: None).result(10)

    def _heard_by_the_scheduler(
        self, sent: set[str], received: set[str], invalid: set[int]
    ) -> None:
        for req_id in sent:
            self._claim("told", self.held.pop(req_id, False), f"{req_id}: sent to nobody")
        awaited = {asked.req_id: asked for asked in self._awaited()}
        for asked in awaited.values():
            asked.invalid |= asked.blocks & invalid
        known: set[int] = set()
        known.update(*(asked.blocks for asked in awaited.values()))
        self._claim("invalid", invalid <= known, f"invalid blocks {invalid - known} are others'")
        for req_id in received:
            self._claim("once", req_id in awaited, f"{req_id} is reported, but not awaited")
            if req_id not in awaited:
                continue
            asked = awaited[req_id]
            flying = self._in_flight(asked)
            self._claim("once", not flying, f"{req_id} is reported while {flying} are in flight")
            lost = asked.blocks if asked.failed else frozenset()
            self._claim(
                "invalid", asked.invalid == lost, f"{req_id}: {asked.invalid} are invalid of {lost}"
            )
            self._claim(
                "invalid",
                asked.processed == (not asked.failed),
                f"{req_id} was processed {asked.processed} times, failed: {asked.failed}",
            )
            asked.reported = True
            self.free |= asked.blocks

    @invariant()
    def nobody_is_told_twice(self) -> None:
        for asked in self.asked:
            for agent, count in self._heard_of(asked).items():
                self._claim("told", count <= 1, f"{agent} heard {count} times of {asked.remote_id}")

    @invariant()
    def nixl_is_used_well(self) -> None:
        self._claim("lives", not self.nixl.misuse, f"{self.nixl.misuse}")
        self._claim("once", not self.futile, f"{self.futile} were posted after a failure")

    def _heard_of(self, asked: Asked) -> dict[str, int]:
        word = f"{asked.remote_id}:{self._readers(self.p_tp)}".encode()
        agents = [agent_name(asked.engine, rank) for rank in target_ranks(self.worker, self.p_tp)]
        return {agent: self.nixl.heard[agent].count(word) for agent in agents}

    def _readers(self, p_tp: int) -> int:
        """What as many ranks as D has say to a P: how many they are, later how many read a rank."""
        return max(1, self.d_tp // p_tp) if _READERS_OF_A_RANK else self.d_tp

    def teardown(self) -> None:
        """Let everything come to an end, and see that it does."""
        if not hasattr(self, "worker"):
            return
        try:
            self._end()
        finally:
            self.worker._recving_transfers.clear()  # else it is released when collected

    def _end(self) -> None:
        self.refusals.clear()
        for _ in range(6):  # a read that failed ends, its engine is forgotten and met anew, is read
            while self.handshakes:
                self.a_handshake_ends("connects")
            self.tick(handshake_between=False)
            self.nixl.finish(*self.nixl.in_flight())
        self.nobody_is_told_twice()
        for asked in self.asked:
            if asked.blocks:
                self._claim("once", asked.reported, f"{asked.req_id} is never reported")
            if asked.connected:
                for agent, count in self._heard_of(asked).items():
                    told = count == (agent not in asked.untold)
                    self._claim("told", told, f"{agent} heard {count} times of {asked}")
        lost = [req_id for req_id, notified in self.held.items() if notified]
        self._claim("told", not lost, f"notifications about {lost} were lost")
        for name in ("_recving_metadata", "_recving_transfers"):
            left = getattr(self.worker, name)
            self._claim("forgotten", not left, f"{name} still has {left}")
        kept = [read.handle for read in self.nixl.reads if not read.released]
        self._claim("forgotten", not kept, f"handles {kept} are never released")


def explore(
    steps: int,
    *,
    faults: Collection[Fault] = FAULTS,
    claims: Collection[Claim] = CLAIMS,
    prepare: Callable[[NixlConnectorWorker], None] = lambda worker: None,
    shrink: bool = True,
) -> int:
    """Run the machine for at least `steps` steps, the same ones every time.

    Args:
        steps: how many.
        faults: what may go wrong.
        claims: what is checked.
        prepare: changes each worker before its first step; for workers that are known to err.
        shrink: whether to look for the shortest way to a broken claim.

    Returns:
        How many steps were run.

    Raises:
        BrokenClaimError: a claim does not hold. Hypothesis prints the steps that lead there.
    """

    class Machine(ReceiveMachine):
        steps = 0

        @invariant()
        def count(self) -> None:
            Machine.steps += 1

    Machine.faults, Machine.claims, Machine.prepare = faults, claims, staticmethod(prepare)
    phases = [Phase.generate, Phase.shrink] if shrink else [Phase.generate]
    with reaching_peers():
        run_state_machine_as_test(  # type: ignore[no-untyped-call, unused-ignore]
            Machine,
            settings=settings(
                # Hypothesis begins with shorter ones.
                max_examples=1 + steps * 4 // (3 * STEPS),
                stateful_step_count=STEPS,
                derandomize=True,
                database=None,
                deadline=None,
                phases=phases,
                print_blob=False,
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
            ),
        )
    return Machine.steps


def broken_claim(steps: int, *, faults: Collection[Fault], claims: Collection[Claim]) -> str:
    """Run the machine as `explore` does, and return what first did not hold, and the steps that led
    there; nothing where everything did."""
    try:
        explore(steps, faults=faults, claims=claims, shrink=False)
    except BrokenClaimError as broken:
        return "\n".join([str(broken), *getattr(broken, "__notes__", ())])
    return ""

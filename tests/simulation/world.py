"""P and D engines, the router before them, and what happens to them: one history, step by step.

An event is a tuple of a name and plain values, so a history is a list that can be stored, cut and
run again. An event that makes no sense where it stands (its request has ended, nothing is under
way) does nothing; that is why every part of a history is one.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from socket import create_connection
from typing import Any

import zmq

from tests.simulation import checks
from tests.simulation.checks import FoundError
from tests.simulation.clock import Clock, Place, replacing, virtual_time
from tests.simulation.engine import DiedError, Engine, Shape, Surroundings, Told
from tests.simulation.side_channel import Jobs, LeaseTalk, Question, lease_questions
from tests.simulation.text import Text, prompt
from tests.simulation.wire import Agent, Read, Wire
from tests.support.nixl_release import NixlConnectorWorker

Event = tuple[Any, ...]

ROUTER = "router"
START_S = 11.0
"""Until an engine that was started again answers on its side channel. vLLM takes longer, and K20
needs it to: P may be asked about a lease just before it ends, and promises 10 s at the most."""


@dataclass(frozen=True)
class Setting:
    """The engines of a history.

    Attributes:
        prefill, decode: the engines by role; P0, P1 ... and D0, D1 ...
    """

    prefill: tuple[Shape, ...] = (Shape(),)
    decode: tuple[Shape, ...] = (Shape(),)


@dataclass
class Job:
    """A client's request, which the router sends to P and then to D.

    Attributes:
        answer: what P's answer says about its KV; None as long as there is none.
        readers: its requests on D by id; the finish reason once they have ended.
        excused: why P may keep its blocks until the lease is over; empty if it may not.
        kept: what D's answer says about the KV that it keeps for a second turn, if it does.
        earlier: the request of which this is the second turn.
    """

    number: int
    p: str
    text: Text
    length: int
    tokens: int
    answered: bool = False
    answer: dict[str, Any] | None = None
    d: str = ""
    readers: dict[str, str | None] = field(default_factory=dict)
    dropped: bool = False
    excused: str = ""
    told: dict[str, list[int]] = field(default_factory=dict)
    kept: dict[str, Any] | None = None
    earlier: Job | None = None

    @property
    def prefill_id(self) -> str:
        return f"r{self.number}-p"

    @property
    def at_router(self) -> bool:
        """Whether P has answered, and nobody was told so yet."""
        return self.answered and not self.d and not self.dropped

    @property
    def over(self) -> bool:
        """Whether the client has its answer, or is gone."""
        done = all(finish is not None for finish in self.readers.values())
        return self.dropped or (bool(self.d) and done)


@dataclass
class Line:
    """A line of the timeline.

    Attributes:
        to: who is reached by it at once.
        begins, ends: a name of what takes its time and begins, or ends, with this line.
        origin: where that comes from, if not from `who`.
    """

    time: float
    who: str
    words: str
    to: str = ""
    begins: str = ""
    ends: str = ""
    origin: str = ""


class Stage:
    """Where histories are played, one after the other: what the release's modules find there.

    Attributes:
        clock: the time of the history that is being played.
        world: that history.
    """

    def __init__(self) -> None:
        self.clock = Clock()
        self.world: World

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Have time, threads and sockets of the release's modules be the simulation's inside."""
        home: Any = sys.modules[NixlConnectorWorker.__mro__[-2].__module__]
        found = {
            "time": virtual_time(self.clock),
            "ThreadPoolExecutor": (ThreadPoolExecutor, lambda *_, **__: self.world.executor()),
            "zmq_ctx": (home.zmq_ctx, lambda _, path: self.world.socket(path)),
            "create_connection": (create_connection, lambda to, _: self.world.connection(*to)),
        }
        if lease_questions is not None:
            asks = lease_questions.LeaseQuestions
            found["LeaseQuestions"] = asks, lambda: self.world.talk()
        with replacing(found, ("vllm.", "vllm_overlay.")):
            yield


class World:
    """See the module.

    Attributes:
        engines: by name, P before D.
        jobs: by number.
        lines: what has happened so far.
        steps: how many events that were.
        asked: how many requests clients have made, also those that were forgotten.
        caught: what was found where the release catches all that is raised; the oldest first.
    """

    def __init__(self, setting: Setting, stage: Stage) -> None:
        stage.world = self
        self.setting, self.clock = setting, stage.clock
        self.clock.now = 0.0
        self.clock.origins.clear()
        self.wire = Wire()
        self.jobs: dict[int, Job] = {}
        self.executors: list[Jobs] = []
        self.lines: list[Line] = []
        self.engines: dict[str, Engine] = {}
        self.shapes: dict[str, Shape] = {}
        self.steps = self.asked = 0
        self.caught: list[FoundError] = []
        self.requests: dict[str, Job] = {}
        self._others: dict[str, Text] = {}  # of no client, or of one that was forgotten
        self._kicked = itertools.count()
        self._incarnations: dict[str, int] = {}
        self.noticed: dict[str, list[str]] = {}
        self.bad_reads: dict[str, str] = {}
        self.failed: set[str] = set()
        self.restarted: set[str] = set()
        self._up: dict[str, float] = {}
        self._named = itertools.count()
        self._under_way: dict[tuple[str, str], deque[str]] = {}  # notifications, by channel
        wire = self.wire
        wire.on_post, wire.on_copy = self._posted, self._copied
        wire.on_sent, wire.on_lost, wire.on_delivered = self._sent, self._lost, self._delivered
        for role, shapes in (("P", setting.prefill), ("D", setting.decode)):
            for i, shape in enumerate(shapes):
                self._start(f"{role}{i}", shape, f"{role}{i}")

    def _start(self, name: str, shape: Shape, engine_id: str) -> None:
        place = [*"PD"].index(name[0]) * 50 + int(name[1:])
        for rank in range(-1, shape.ranks):
            node = 0 if rank < 0 else rank * shape.nodes // shape.ranks
            # No machine's clock begins where another's does, nor in their order.
            origin = 50_000.0 + 100_000.0 * place - 40_000.0 * node * (-1) ** place
            self.clock.origins[Place(name, rank)] = origin
        self.shapes[name] = shape
        around = Surroundings(self.clock, self.wire, self._text_of, self.note)
        self.engines[name] = Engine(name, engine_id, 5000 + place, shape, around)

    # What the surroundings do.

    def note(self, who: str, words: str, **more: str) -> None:
        self.lines.append(Line(self.clock.now, who, words, **more))

    def executor(self) -> Jobs:
        """A thread pool of the place that is running."""
        jobs = Jobs(self.clock)
        self.executors.append(jobs)
        return jobs

    def socket(self, path: str) -> Any:  # noqa: ANN401 - a context manager
        """A socket on which to ask whoever listens at `path`."""
        return contextlib.nullcontext(Question(path, self._reach))

    def talk(self) -> LeaseTalk:
        """What asks about leases for the scheduler that is running."""
        return LeaseTalk(self.executor(), self._reach)

    def connection(self, host: str, _: int) -> Any:  # noqa: ANN401 - something to close
        """A connection to whoever listens at `host`; raises `OSError` if nobody does."""
        if self._listening(host) is None:
            raise TimeoutError(f"no route to {host}")
        return contextlib.ExitStack()

    def _listening(self, host: str) -> Engine | None:
        asking = self.clock.here.engine
        for engine in self.engines.values():
            reached = engine.host == host and frozenset((asking, engine.name)) not in self.wire.cut
            if reached and self.clock.now >= self._up.get(engine.name, 0.0):
                return engine
        return None

    def _reach(self, path: str, question: list[bytes]) -> list[bytes]:
        engine = self._listening(path.removeprefix("tcp://").rsplit(":", 1)[0])
        if engine is not None:
            return engine.answer(question)
        for job in self.jobs.values():
            if job.d == self.clock.here.engine:
                job.excused = "D could not reach P"
        raise zmq.Again

    def _text_of(self, req_id: str) -> Text:
        return self.requests[req_id].text if req_id in self.requests else self._others[req_id]

    def _posted(self, read: Read) -> None:
        d, p = self._pair(read)
        remote_id = read.notification.decode().rsplit(":", 1)[0]
        blocks = {i % self.shapes[d.name].blocks for i in read.local}
        holders = {one for block in blocks for one in d.holders(block)}
        owners = [r for r in holders if blocks <= d.blocks_of(r)]
        mine = [r for r in owners if r in self.requests]
        job = self.requests.get(remote_id)
        here = [r for r in mine if job is not None and r in self._readers_of(job, d.name)]
        number = int(remote_id[1:].split("-")[0])
        read.tag.update(request=here[0] if here else None, remote=remote_id, number=number)
        words = f"reads {len(read.pairs)} pieces of {remote_id} from {p.name}"
        who = f"{here[0] if here else '?'}: rank {read.reader.place.rank}"
        self.note(d.name, f"{who} {words}", begins=f"read {read.handle}", origin=p.name)
        if not here:  # a worker that posts a read takes whatever is raised for a refusal of NIXL's
            self.caught.append(FoundError("a read into blocks of nobody", f"{d.name[0]}"))

    def _readers_of(self, job: Job, reader: str) -> list[str]:
        """The requests at an engine that may read a job's KV: D's, and P's for a second turn."""
        turns = [j.prefill_id for j in self.jobs.values() if j.earlier is job and j.p == reader]
        return [*turns, *(job.readers if job.d == reader else ())]

    def _copied(self, read: Read, count: int) -> None:
        """Some of a read is about to be copied: by whom is what it reads and writes held now?"""
        if read.owner.place.engine not in self.engines or not read.owner.alive:
            return
        d, p = self._pair(read)
        request, remote = read.tag["request"], read.tag["remote"]
        span = slice(read.copied, read.copied + count)
        for block in sorted({i % self.shapes[d.name].blocks for i in read.local[span]}):
            holders = d.holders(block)
            if holders and request not in holders:
                raise FoundError(
                    "a read writes into another's block",
                    f"{d.name}: block {block} is {holders[0]}'s, the read {request}'s",
                )
        theirs = {i % self.shapes[p.name].blocks for i in read.remote[span]}
        if request not in self.bad_reads and not theirs <= p.blocks_of(remote):
            notices = self.noticed.get(remote, [])
            why = "another reader is done" if notices else "its lease is over"
            if p.name in self.restarted:
                why = "it was restarted"
            self.bad_reads[request] = f"{p.name} no longer holds {remote}: {why}"
            self.note(p.name, f"{remote}'s blocks are read, and not held: {why}")
        done = read.copied + count == len(read.pairs)
        ends = f"read {read.handle}" if done else ""
        self.note(d.name, f"{request}: read {'is complete' if done else 'goes on'}", ends=ends)

    def _pair(self, read: Read) -> tuple[Engine, Engine]:
        return self.engines[read.reader.place.engine], self.engines[read.owner.place.engine]

    def _sent(self, sender: Agent, receiver: Agent, payload: bytes) -> None:
        words = f"tells {receiver.place.engine}.{receiver.place.rank}: {payload.decode()}"
        name = f"word {next(self._named)}"
        self._under_way.setdefault((sender.name, receiver.name), deque()).append(name)
        self.note(sender.place.engine, words, begins=name)

    def _delivered(self, sender: str, receiver: str, payload: bytes) -> None:
        place = self.wire.agents[receiver].place
        words = payload.decode(errors="replace")
        if not payload.startswith(b"HB:"):
            self.noticed.setdefault(words.rsplit(":", 1)[0], []).append(sender)
        name = self._under_way[sender, receiver].popleft()
        self.note(place.engine, f"rank {place.rank} gets {words}", ends=name)

    def _lost(self, sender: Agent, receiver: Agent, payload: bytes) -> None:
        """A notification will never arrive; P cannot know better than by its lease."""
        if not self.wire.connected(sender, receiver):
            self._under_way.pop((sender.name, receiver.name), None)
        self.note(sender.place.engine, f"lost: {payload.decode(errors='replace')}")
        job = self.requests.get(payload.decode(errors="replace").rsplit(":", 1)[0])
        if job is not None:
            job.excused = "a notification was lost"

    # Events.

    def apply(self, event: Event) -> None:
        """Let an event happen, if it can.

        Raises:
            FoundError: something is not as it must be.
        """
        name, *values = event
        self.steps += 1
        with self._all_alive():
            getattr(self, f"_event_{name}")(*values)
        checks.after_event(self)

    def _event_ask(
        self, number: int, p: str, family: int, shared: int, length: int, tokens: int
    ) -> None:
        """A client's prompt comes to P."""
        if number in self.jobs or p not in self.engines:
            return
        text = Text(prompt(family, shared, number, length))
        params = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
        self._prefill(Job(number, p, text, length, tokens), params)

    def _event_again(self, number: int, earlier: int, p: str, more: int, tokens: int) -> None:
        """A second turn comes to P: what was said until now and `more` tokens, with D's word on
        what it keeps of it."""
        first = self.jobs.get(earlier)
        if number in self.jobs or first is None or first.kept is None or p not in self.engines:
            return
        said = first.length + len(first.told[first.kept["remote_request_id"]])
        text = Text([*first.text.tokens[:said], *prompt(0, 0, number, more)])
        job = Job(number, p, text, said + more, tokens, earlier=first)
        self._prefill(job, json.loads(json.dumps(first.kept)))

    def _prefill(self, job: Job, params: dict[str, Any]) -> None:
        self.asked = job.number + 1
        self.jobs[job.number] = self.requests[job.prefill_id] = job
        turn = f", after r{job.earlier.number}" if job.earlier else ""
        self.note(ROUTER, f"r{job.number}: {job.length} tokens to {job.p}{turn}", to=job.p)
        self.engines[job.p].add(job.prefill_id, job.text, job.length, 1, params)

    def _event_plain(
        self, number: int, name: str, family: int, shared: int, length: int, tokens: int
    ) -> None:
        """A client's prompt comes to one engine, which does it all."""
        if number in self.jobs or name not in self.engines:
            return
        job = Job(number, "", Text(prompt(family, shared, number, length)), length, tokens)
        job.answered, job.d = True, name
        req_id = f"r{number}-x"
        self.asked = number + 1
        self.jobs[number] = self.requests[req_id] = job
        job.readers[req_id] = None
        self.note(ROUTER, f"r{number}: {length} tokens to {name} alone", to=name)
        self.engines[name].add(req_id, job.text, length, tokens, None)

    def _event_forward(self, number: int, d: str, readers: int) -> None:
        """P's answer goes to D, in as many requests as D's API server makes of one."""
        job = self.jobs.get(number)
        if job is None or not job.at_router or d not in self.engines:
            return
        job.d = d
        self.note(ROUTER, f"r{number} to {d}" + (f" as {readers}" if readers > 1 else ""), to=d)
        for i in range(readers):
            req_id = f"r{number}-d{i}"
            job.readers[req_id] = None
            self.requests[req_id] = job
            params = None if job.answer is None else json.loads(json.dumps(job.answer))
            self.engines[d].add(req_id, job.text, job.length, job.tokens, params)

    def _event_reject(self, number: int, d: str) -> None:
        """D's API server turns away what the router sends it."""
        job = self.jobs.get(number)
        if job is None or not job.at_router or d not in self.engines:
            return
        job.d = d
        self.note(ROUTER, f"r{number}: {d} rejects it", to=d)
        if job.answer is not None:
            self.engines[d].reject(f"r{number}", json.loads(json.dumps(job.answer)))

    def _event_drop(self, number: int) -> None:
        """The client leaves while the router has its request; nobody else hears of it."""
        job = self.jobs.get(number)
        if job is None or not job.at_router:
            return
        job.dropped, job.excused = True, "its client left between P and D"
        self.note(ROUTER, f"r{number}: its client has left")

    def _event_abort(self, number: int, side: str) -> None:
        """The client leaves while P, or D, has its request."""
        job = self.jobs.get(number)
        if job is None:
            return
        if side == "P" and not job.answered and not job.dropped and job.p in self.engines:
            job.dropped = True
            self.note(ROUTER, f"r{number}: aborted at {job.p}", to=job.p)
            self.engines[job.p].abort(job.prefill_id)
        for req_id, finish in job.readers.items():
            if side == "D" and finish is None and job.d in self.engines:
                job.readers[req_id] = "abort"
                self.note(ROUTER, f"r{number}: aborted at {job.d}", to=job.d)
                self.engines[job.d].abort(req_id)

    def _event_tick(self, name: str) -> None:
        """An engine's loop goes round once."""
        if name in self.engines:
            for told in self.engines[name].tick():
                self._tell(self.engines[name], told)
            checks.overdue(self, self.engines[name])

    def _event_model(self, name: str) -> None:
        """The model of an engine runs a step that was scheduled."""
        if name in self.engines:
            self.engines[name].compute()

    def _event_job(self, engine: str, rank: int) -> None:
        """A handshake of a rank ends, or whatever else its threads do."""
        for jobs in self.executors:
            if jobs.place == Place(engine, rank) and len(jobs):
                self.note(engine, f"rank {rank}: a thread does its work")
                jobs.run()
                return

    def _event_job_breaks(self, engine: str, rank: int) -> None:
        """A handshake of a rank breaks off."""
        for jobs in self.executors:
            if jobs.place == Place(engine, rank) and len(jobs):
                self.note(engine, f"rank {rank}: a handshake breaks off")
                for job in self.jobs.values():
                    if job.d == engine:
                        job.excused = "D could not reach P"
                jobs.run(TimeoutError("the handshake breaks off"))
                return

    def _event_move(self, number: int, rank: int, pieces: int) -> None:
        """The oldest read of a request at a rank copies some more of its descriptors."""
        for read in self._reads(number, rank):
            self.wire.move(read, pieces)
            return

    def _event_fail(self, number: int, rank: int) -> None:
        """The oldest read of a request at a rank ends in an error."""
        for read in self._reads(number, rank):
            words = f"{read.tag['request']}: a read fails"
            self.note(read.reader.place.engine, words, ends=f"read {read.handle}")
            self.failed.add(read.tag["request"])
            self.wire.fail(read)
            return

    def _reads(self, number: int, rank: int) -> Iterator[Read]:
        for read in list(self.wire.reads):
            if read.tag["number"] == number and read.reader.place.rank == rank:
                yield read

    def _event_deliver(self, sender: str, receiver: str) -> None:
        """The oldest notification between two agents arrives."""
        self.wire.deliver((sender, receiver))

    def _event_refuse(self, engine: str, call: str) -> None:
        """NIXL refuses an engine its next such call."""
        self.note(engine, f"NIXL will refuse {call}")
        self.wire.refuse[engine, call] = 1

    def _event_time(self, seconds: float) -> None:
        self.clock.now += seconds
        self.note(ROUTER, f"{seconds:g} s pass")

    def _event_cut(self, one: str, other: str) -> None:
        """The connection of two engines is gone."""
        self.note(one, f"cut off from {other}")
        self._excuse(one, other)
        self.wire.break_off(one, other)

    def _event_mend(self, one: str, other: str) -> None:
        self.note(one, f"reaches {other} again")
        self.wire.mend(one, other)

    def _event_restart(self, name: str, anew: bool) -> None:
        """An engine's processes end and are started again, under a new id if `anew`."""
        engine = self.engines.get(name)
        if engine is None:
            return
        self._excuse(name)
        self.restarted.add(name)
        self._up[name] = self.clock.now + START_S
        self.wire.kill(name)
        engine.end()
        self.executors = [jobs for jobs in self.executors if jobs.place.engine != name]
        for job in self.jobs.values():
            if job.p == name and not job.answered:
                job.dropped = True
            if job.d == name:
                job.readers = {r: finish or "gone" for r, finish in job.readers.items()}
        self._incarnations[name] = self._incarnations.get(name, 0) + anew
        engine_id = f"{name}{'x' * self._incarnations[name]}"
        self.note(name, f"restarts as {engine_id}")
        del self.engines[name]
        self._start(name, self.shapes[name], engine_id)
        order = sorted(self.engines, key=lambda n: (n[0] != "P", n))
        self.engines = {n: self.engines[n] for n in order}

    def _excuse(self, *names: str) -> None:
        for job in self.jobs.values():
            if (job.p in names or job.d in names) and not job.excused:
                job.excused = "its connection broke"

    def _tell(self, engine: Engine, told: Told) -> None:
        """The answer of a step goes to the client, or the router."""
        job = self.requests.get(told.req_id)
        if job is None:
            return
        checks.answer(self, engine, job, told)
        job.told.setdefault(told.req_id, []).extend(told.tokens)
        if told.finish is None:
            return
        if told.req_id == job.prefill_id:
            if job.answered:
                raise FoundError("a request ended twice", f"{told.req_id} at {engine.name}")
            job.answered, job.answer = True, told.params
            self.note(engine.name, f"{told.req_id} is answered: {told.finish}", to=ROUTER)
        elif job.readers.get(told.req_id) is not None:
            raise FoundError("a request ended twice", f"{told.req_id} at {engine.name}")
        else:
            job.readers[told.req_id] = told.finish
            job.kept = told.params or job.kept
            self.note(engine.name, f"{told.req_id} has ended: {told.finish}", to=ROUTER)

    # The end of a history.

    def kick(self, name: str) -> None:
        """Give an engine a request that has nothing to do with others."""
        number = next(self._kicked)
        req_id = f"k{number}-{name}"
        text = self._others[req_id] = Text(prompt(1000 + number, 1, 0, 1))
        with self._all_alive():
            self.engines[name].add(req_id, text, 1, 1, None)

    @contextlib.contextmanager
    def _all_alive(self) -> Iterator[None]:
        try:
            yield
        except DiedError as died:
            raise FoundError("an engine died", checks.cause_of(died)) from died

    def round(self, seconds: float) -> None:
        """Whatever is under way goes on: notifications, threads, reads, engines."""
        for one, other in [tuple(sorted(pair)) for pair in self.wire.cut]:
            self.apply(("mend", one, other))
        self.wire.refuse.clear()
        for channel in list(self.wire.channels):
            for _ in range(len(self.wire.channels.get(channel, ()))):
                self.apply(("deliver", *channel))
        for jobs in self.executors:
            for _ in range(len(jobs)):
                self.apply(("job", *jobs.place))
        for read in list(self.wire.reads):
            self.apply(("move", read.tag["number"], read.reader.place.rank, len(read.pairs)))
        decode = [name for name in self.engines if name[0] == "D"]
        for job in list(self.jobs.values()):
            if job.at_router:
                self.apply(("forward", job.number, decode[job.number % len(decode)], 1))
        for name in list(self.engines):
            self.apply(("tick", name))
        self.clock.now += seconds

    def forget(self) -> None:
        """Know no more of requests, so that the next are as the first; the engines go on."""
        known = {**self._others, **{req_id: job.text for req_id, job in self.requests.items()}}
        engines = self.engines.values()
        held = {req_id for engine in engines for req_id in engine.scheduler.requests}
        self._others = {req_id: text for req_id, text in known.items() if req_id in held}
        for memory in (self.jobs, self.requests, self.noticed, self.bad_reads):
            memory.clear()
        self.failed.clear()
        self.lines.clear()
        for engine in engines:
            for told in (engine.wrong, engine.asked, engine.reported):
                told.clear()
        self.wire.forget()

    def close(self) -> None:
        """Let go of the engines; their memory is no longer used by anyone."""
        for engine in self.engines.values():
            self.wire.kill(engine.name)
        self.engines.clear()

"""Hostile clients and peers (`tests.support.hostile`) come to vLLM's own server, engine and worker.

Each of the functions sends so many cases, and then has an honest client or peer come.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import os
import socket
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import msgspec
import zmq

from tests.support.harness import HarnessError
from tests.support.hostile import Case, Places
from tests.support.hurried_clock import Clock
from tests.support.idle_engine import IdleEngine
from tests.support.nixl_release import GET_META_MSG, NixlHandshakePayload
from tests.support.nixl_worker import (
    STAGES,
    EngineDiedError,
    lives,
    make_worker,
    nixl_of,
    peer_metadata,
)
from tests.support.offering import answer_handshakes, scheduler_part
from tests.support.serving_app import REMOTE, Server, body, serving
from tests.support.side_channel import SideChannel

WARM = 0.2
"""Of the cases: memory is measured from there on."""

THREADS = 5
"""Of an engine that has talked to peers: it shakes hands, tells (K12) and asks (K20), and two are
ZeroMQ's."""

MEGABYTES = 10.0
"""More for 10,000 cases. Claims (K11) are the most of it: a few hundred bytes each, and bounded."""

LEFT = "tasks left"


class Visits(NamedTuple):
    """What came of a number of cases.

    Attributes:
        cases: How many were sent.
        outcomes: How they ended.
        died: What ended the engine, or the listener; empty if nothing did.
        served: Whether an honest client or peer was served afterwards.
        threads: More than before.
        megabytes: Of Python's, more than after the first fifth of the cases.
        faults: Requests that the server calls its own fault (HTTP 5xx), or does not answer.
    """

    cases: int
    outcomes: dict[str, int]
    died: str
    served: bool
    threads: int
    megabytes: float
    faults: Sequence[str] = ()

    def broken(self) -> list[str]:
        """The rules that the cases have broken."""
        rules = {
            "nothing dies": not self.died,
            "an honest one is served": self.served,
            f"no more than {THREADS} threads": self.threads <= THREADS,
            f"no more than {MEGABYTES} MB": self.megabytes <= MEGABYTES,
            "no task is left": not self.outcomes.get(LEFT),
        }
        return [rule for rule, kept in rules.items() if not kept]

    def __str__(self) -> str:
        return (
            f"{self.cases} cases: {self.died or 'nothing died'}; "
            f"{'' if self.served else 'NOT '}served after it; {self.threads:+d} threads, "
            f"{self.megabytes:+.1f} MB; {self.outcomes}"
        )


class _Measured:
    """Threads and memory of this process while cases run."""

    def __init__(self, cases: int) -> None:
        self._cases = cases
        self._warm = 0.0
        self._threads = self._now()

    def case(self, number: int) -> None:
        if number == int(WARM * self._cases):
            gc.collect()
            self._warm = tracemalloc.get_traced_memory()[0]

    def over(self) -> tuple[int, float]:
        """More threads, once those that are ending have ended, and more megabytes."""
        gc.collect()
        deadline = time.monotonic() + 5
        while self._now() > self._threads and time.monotonic() < deadline:
            time.sleep(0.05)
        return (
            self._now() - self._threads,
            (tracemalloc.get_traced_memory()[0] - self._warm) / 2**20,
        )

    @staticmethod
    def _now() -> int:
        return len([*Path("/proc/self/task").iterdir()])


@contextlib.contextmanager
def _tracing() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


def _cases(seed: str, number: int) -> Iterator[Case]:
    return (Case(seed, i) for i in range(number))


# ---------------------------------------------------------------- clients


def clients(seed: str, cases: int) -> Visits:
    """Send bodies to the API server, and what it takes to an engine with a worker."""
    engine = IdleEngine(num_blocks=200)
    liar_says = SideChannel(engine.worker, "liar")
    with contextlib.ExitStack() as stack:
        stack.callback(engine.worker._handshake_initiation_executor.shutdown, cancel_futures=True)
        places = Places(
            _free_port(),
            stack.enter_context(liar_says).port,
            stack.enter_context(SideChannel(engine.worker, "P")).port,
        )
        good = liar_says._describe
        answered = iter(range(10**9))
        liar_says._describe = lambda rank: Case(f"{seed}/answer", next(answered)).answer(good(0))
        answering = (f":{places.liar}", f":{places.honest}")
        stack.enter_context(Clock().hurries(lambda path: not path.endswith(answering)))
        stack.enter_context(_tracing())
        return asyncio.run(_clients(seed, cases, engine, places))


async def _clients(seed: str, cases: int, engine: IdleEngine, places: Places) -> Visits:
    outcomes: Counter[str] = Counter()
    died, served, sent = "", False, 0
    faults: list[str] = []
    async with serving() as server:
        await server.post("/v1/completions", body("/v1/completions", None))  # starts what it needs
        server.core.reset()
        tasks, measured = _tasks(), _Measured(cases)
        try:
            for case in _cases(seed, cases):
                sent = case.number + 1
                path, raw = case.request(places)
                answer = await server.post(path, raw)
                if answer.status >= 500 or answer.closed:
                    faults.append(f"case {case.number}: {path} {raw!r}")
                outcomes[f"HTTP {answer.status}"] += 1
                outcomes["admitted"] += _hand_over(server, engine)
                _step(engine)
                if case.random.random() < 0.3:
                    for req_id in list(engine.scheduler.requests):
                        engine.abort(req_id)
                measured.case(case.number)
            served = await _serves(server, engine, places)
        except EngineDiedError as error:
            died = f"case {sent - 1}: {error}"
        threads, megabytes = measured.over()
        if left := _tasks() - tasks:
            outcomes[LEFT] = left
    return Visits(sent, dict(outcomes), died, served, threads, megabytes, tuple(faults))


def _tasks() -> int:
    """Tasks, but for the loops in which vLLM tokenizes, one for each way that was asked for."""
    loops = "AsyncMicrobatchTokenizer."
    return sum(
        not getattr(task.get_coro(), "__qualname__", "").startswith(loops)
        for task in asyncio.all_tasks()
    )


def _hand_over(server: Server, engine: IdleEngine) -> int:
    """Give the engine what the server has sent to the engine core."""
    sent = [*server.core.requests]
    server.core.reset()
    for request in sent:
        lives(engine.add, request)
    return len(sent)


def _step(engine: IdleEngine) -> None:
    nixl = nixl_of(engine.worker)
    engine.step()
    nixl.finish(*nixl.in_flight())
    for record in (nixl.calls, nixl.heard):  # the test's own
        record.clear()
    if len(nixl.reads) > 100:
        nixl.reads[:] = [read for read in nixl.reads if not read.released]
        nixl._reads = {read.handle: read for read in nixl.reads}


async def _serves(server: Server, engine: IdleEngine, places: Places) -> bool:
    """Whether an honest client of an honest peer is served, and all that came before has ended."""
    params = REMOTE | {
        "remote_engine_id": "P",
        "remote_port": places.honest,
        "remote_request_id": "honest",
    }
    answer = await server.post("/v1/completions", body("/v1/completions", params))
    if answer.status != 200 or not _hand_over(server, engine):
        return False
    deadline = time.monotonic() + 60
    read = False
    while engine.scheduler.has_requests() and time.monotonic() < deadline:
        read |= any(r.notif.startswith(b"honest:") for r in nixl_of(engine.worker).reads)
        _step(engine)
    return read and not engine.scheduler.has_requests()


# ---------------------------------------------------------------- the side channel


def handshakes(seed: str, cases: int, *, readable: bool = True) -> Visits:
    """Send messages to the listener of a prefill server's side channel, then shake hands."""
    port = _free_port()
    place = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port), "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1"}
    with mock.patch.dict(os.environ, place), _tracing():
        engine = IdleEngine()
        listening = scheduler_part(engine)
        reader = make_worker(engine_id="reader")
        answer_handshakes(engine, _of(reader))
        measured = _Measured(cases)
        try:
            return _handshakes(_cases(seed, cases), listening, reader, port, measured, readable)
        finally:
            listening.shutdown()
            reader._handshake_initiation_executor.shutdown(cancel_futures=True)


def _of(reader: Any) -> Any:  # noqa: ANN401 - a worker, and its release's payload
    about = msgspec.msgpack.encode(peer_metadata(reader, "P"))
    return NixlHandshakePayload(compatibility_hash=reader.compat_hash, agent_metadata_bytes=about)


def _handshakes(
    cases: Iterable[Case],
    listening: Any,  # noqa: ANN401 - `NixlConnectorScheduler`
    reader: Any,  # noqa: ANN401 - `NixlConnectorWorker`
    port: int,
    measured: _Measured,
    readable: bool,
) -> Visits:
    thread: threading.Thread = listening._nixl_handshake_listener_t
    first_rank = [GET_META_MSG, 0, 0] if STAGES else [GET_META_MSG, 0]
    lease = ["x" * 32, "reader", ["agent"], 1.0]
    outcomes: Counter[str] = Counter()
    died, sent = "", 0
    with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.setsockopt(zmq.LINGER, 0)
        asking.setsockopt(zmq.SNDTIMEO, 2000)
        asking.connect(f"tcp://127.0.0.1:{port}")
        for case in cases:
            number, sent = case.number, case.number + 1
            if not readable and case.random.random() < 0.02:
                _not_even_zmq(port, case.random.randbytes(case.random.randrange(100)))
            asking.send_multipart(case.question(first_rank, lease, readable=readable))
            while asking.poll(1 if number % 16 == 15 else 0):
                asking.recv_multipart()
                outcomes["answers"] += 1
            if not thread.is_alive():
                died = f"case {number} or before: the listener"
                break
            measured.case(number)
    threads, megabytes = measured.over()
    try:
        wide = (1, 1) if STAGES else ()
        agents = reader._nixl_handshake("127.0.0.1", port, 1, "P", *wide)
    except zmq.Again:
        agents = None
    return Visits(sent, dict(outcomes), died, bool(agents), threads, megabytes)


def _not_even_zmq(port: int, raw: bytes) -> None:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as line:
        line.sendall(raw)


# ---------------------------------------------------------------- notifications


def notifications(seed: str, cases: int) -> Visits:
    """Have a prefill server's worker hear notifications, while it holds blocks, then a good one."""
    engine = IdleEngine(num_blocks=2000)
    nixl = nixl_of(engine.worker)
    outcomes: Counter[str] = Counter()
    died, served, sent = "", False, 0
    with _tracing():
        measured = _Measured(cases)
        try:
            for case in _cases(seed, cases):
                number, sent = case.number, case.number + 1
                if number % 100 == 0:
                    _hold(engine, f"held-{number}")
                held = [f"held-{number - number % 100}", f"held-{case.random.randrange(cases)}"]
                nixl.inbox.setdefault(f"agent-{number % 3}", []).append(case.notification(held))
                if number % 8 == 7:
                    _step(engine)
                measured.case(number)
            _hold(engine, "honest")
            nixl.inbox = {"agent": [b"honest:1"]}
            before = _held(engine)
            _step(engine)
            _step(engine)
            served = "honest" in before and "honest" not in _held(engine)
            outcomes["held after it, until their lease ends"] = len(_held(engine))
        except EngineDiedError as error:
            died = f"case {sent - 1} or before: {error}"
        threads, megabytes = measured.over()
    return Visits(sent, dict(outcomes), died, served, threads, megabytes)


def _hold(engine: IdleEngine, req_id: str) -> None:
    engine.send(req_id, range(20), {"do_remote_decode": True}, max_tokens=1)
    for _ in range(3):
        _step(engine)
    if req_id not in _held(engine):
        raise HarnessError(f"{req_id} has finished and its blocks are free", "blocks for a reader")


def _held(engine: IdleEngine) -> set[str]:
    return set(engine.worker._reqs_to_send)


KINDS: dict[str, Callable[[str, int], Visits]] = {
    "clients": clients,
    "handshakes": handshakes,
    "strangers to handshakes": functools.partial(handshakes, readable=False),
    "notifications": notifications,
}

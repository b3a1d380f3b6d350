"""10,000 requests that name 10,000 peers: what D keeps of them, and who waits (`nox -s soak`).

vLLM's scheduler, worker and handshakes, over ZeroMQ; NIXL is scripted. Half of the peers are a port
where nobody listens, half somebody who never answers. vLLM waits 5 s for either; here clocks are
put forward (`tests.support.hurried_clock`), so that seconds below are vLLM's.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import queue
import time
import tracemalloc
from collections.abc import Iterator, Sized
from pathlib import Path
from typing import Any, Literal, NamedTuple
from unittest import mock

import pytest
import zmq

from tests.support import decode_engine, nixl_worker
from tests.support.hurried_clock import VLLMS, Clock
from tests.support.idle_engine import IdleEngine
from tests.support.nixl_worker import EngineDiedError, make_worker, nixl_of
from tests.support.side_channel import SideChannel, silent

REQUESTS = 10_000
WAIT = 20.0
"""Seconds; the option `max_handshake_wait` of those tests that set it."""

Ending = Literal["stays", "leaves", "leaves at once"]
"""What a client does: wait, leave while D shakes hands for it, or leave before D has begun."""

BOUNDED = {
    "ConfirmedReads._unconfirmed": 2**10,  # engines whose reads D has called unconfirmed
    "NixlConnectorWorker._handshake_reports": 2,  # kinds of failure, and how often each was said
}
"""Tables of ours that keep something, and how many entries at the most."""

pytestmark = pytest.mark.timeout(5400)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


# ---------------------------------------------------------------- what is kept


class Kept(NamedTuple):
    """What a process holds, and how many entries the tables of the engine have."""

    threads: int
    files: int
    megabytes: float
    entries: dict[str, int]


def kept(engine: IdleEngine) -> Kept:
    nixl = nixl_of(engine.worker)
    for record in (nixl.calls, nixl.reads, nixl.heard, nixl._reads):  # the test's own
        record.clear()
    gc.collect()
    return Kept(
        len([*Path("/proc/self/task").iterdir()]),
        len([*Path("/proc/self/fd").iterdir()]),
        tracemalloc.get_traced_memory()[0] / 2**20,
        dict(_entries(engine)),
    )


def _entries(engine: IdleEngine) -> Iterator[tuple[str, int]]:
    connector: Any = engine.scheduler.connector
    sides = (engine.worker, connector.connector_scheduler)
    ours = [
        part
        for side in sides
        for name, part in vars(side).items()
        if name in ("_receives", "_notifications", "_renewals", "_confirmed_reads") and part
    ]
    cache = engine.scheduler.kv_cache_manager
    topology = nixl_worker.topology_of(engine.worker)
    for part in (*sides, *ours, engine.scheduler, cache, topology):
        for name, value in vars(part).items():
            if isinstance(value, queue.Queue | queue.SimpleQueue):
                yield f"{type(part).__name__}.{name}", value.qsize()
            elif isinstance(value, Sized) and not isinstance(value, str | bytes):
                yield f"{type(part).__name__}.{name}", len(value)


def grown(before: Kept, after: Kept) -> dict[str, int]:
    """The tables that have more entries than before."""
    return {
        name: size - before.entries.get(name, 0)
        for name, size in after.entries.items()
        if size > before.entries.get(name, 0)
    }


# ---------------------------------------------------------------- the clients


class Visit(NamedTuple):
    """What came of the strangers.

    Attributes:
        died: What ended the engine.
        line: Handshakes that waited when all had asked.
        waited: Seconds until an honest peer that was named then was connected.
        tries: How many requests that took; one that cannot be read is computed.
        pending: What was kept when all had asked.
        before: What was kept before the first had.
        after: What was kept when all was over.
    """

    died: str
    line: int
    waited: float
    tries: int
    pending: Kept
    before: Kept
    after: Kept

    def left(self) -> dict[str, int]:
        """The tables with entries of strangers, when all was over, but those that are bounded."""
        found = grown(self.before, self.after)
        # Of the others one entry may be left: the honest peer is kept.
        return {name: n for name, n in found.items() if n > BOUNDED.get(name, 1)}

    def __str__(self) -> str:
        if self.died:
            return f"engine ended: {self.died}"
        return (
            f"line {self.line}; honest read after {self.waited:.0f} s ({self.tries} tries); "
            f"{self._more(self.pending)} while; {self._more(self.after)} after; left {self.left()}"
        )

    def _more(self, then: Kept) -> str:
        return (
            f"{then.threads - self.before.threads:+d} threads, "
            f"{then.files - self.before.files:+d} files, "
            f"{then.megabytes - self.before.megabytes:+.1f} MB"
        )


def visit(ending: Ending, requests: int = REQUESTS, **extra: float) -> Visit:
    """Have `requests` clients name as many peers; `extra` is what the operator has configured."""
    made = functools.partial(make_worker, extra_config=extra)
    with mock.patch.object(decode_engine, "make_worker", made):
        engine = IdleEngine(num_blocks=requests + 100)
    clock = Clock()
    with contextlib.ExitStack() as stack:
        ports = (_nobody(), stack.enter_context(SideChannel(engine.worker, answers=silent)).port)
        silence = tuple(f":{port}" for port in ports)
        stack.enter_context(clock.hurries(lambda path: path.endswith(silence)))
        honest = stack.enter_context(SideChannel(engine.worker, "P"))
        tracemalloc.start()
        stack.callback(tracemalloc.stop)
        # What is left in the line would keep the process from ending.
        end = functools.partial(
            engine.worker._handshake_initiation_executor.shutdown, cancel_futures=True
        )
        stack.callback(end)
        return _visit(engine, clock, ports, honest.port, ending, requests)


def _visit(
    engine: IdleEngine,
    clock: Clock,
    ports: tuple[int, ...],
    honest: int,
    ending: Ending,
    requests: int,
) -> Visit:
    before = pending = kept(engine)
    line = tries = 0
    clock.runs.clear()  # until all have asked
    began = clock.now()
    try:
        for i in range(requests):
            _ask(engine, f"r{i}", f"stranger-{i}", ports[i % len(ports)])
            if ending == "leaves at once":
                engine.abort(f"r{i}")
            if i % 16 == 15:
                engine.step()
        engine.step()
        if ending == "leaves":
            for i in range(requests):
                engine.abort(f"r{i}")
        engine.step()
        pending, line = kept(engine), len(engine.worker._handshake_futures)
        clock.runs.set()
        began = clock.now()
        while "P" not in engine.worker._remote_agents:
            if f"honest-{tries}" not in engine.scheduler.requests:
                tries += 1
                _ask(engine, f"honest-{tries}", "P", honest)
            engine.step()
            time.sleep(0.005)  # the thread that shakes hands has work to do
        waited = clock.now() - began
        while engine.scheduler.has_requests() or engine.worker._handshake_futures:
            nixl_of(engine.worker).finish(*nixl_of(engine.worker).in_flight())
            engine.step()
            time.sleep(0.005)
        deadline = time.monotonic() + 120
        while _waiting(engine) and time.monotonic() < deadline:
            time.sleep(0.01)
            engine.step()
    except EngineDiedError as died:
        clock.runs.set()
        return Visit(str(died), line, clock.now() - began, tries, pending, before, before)
    time.sleep(0.5)  # threads of ZeroMQ's contexts end
    return Visit("", line, waited, tries, pending, before, kept(engine))


def _waiting(engine: IdleEngine) -> bool:
    notifications = vars(engine.worker).get("_notifications")
    return notifications is not None and notifications.pending() > 0


def _nobody() -> int:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        return socket.bind_to_random_port("tcp://127.0.0.1")


def _ask(engine: IdleEngine, req_id: str, engine_id: str, port: int) -> None:
    engine.send(
        req_id,
        [hash(req_id) % 100, *range(10)],
        {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[1]],
            "remote_engine_id": engine_id,
            "remote_request_id": f"{req_id}-at-p",
            "remote_host": "127.0.0.1",
            "remote_port": port,
            "tp_size": 1,
        },
    )


ENDINGS: tuple[Ending, ...] = ("stays", "leaves", "leaves at once")


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_stock_engine_ends_or_all_wait(ending: Ending) -> None:
    came = visit(ending)
    print(f"\nstock, {ending}: {came}")
    assert came.died or came.waited > 1000


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_patched_engine_keeps_nothing(ending: Ending) -> None:
    came = visit(ending)
    print(f"\npatched, {ending}: {came}")
    assert not came.died
    assert not came.left()


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_patched_engine_bounds_the_wait(ending: Ending) -> None:
    came = visit(ending, max_handshake_wait=WAIT)
    print(f"\npatched, max_handshake_wait {WAIT}, {ending}: {came}")
    assert not came.died
    assert not came.left()
    # Each try waits for those before it, a handshake that has begun by then, and its own.
    assert came.waited < came.tries * (WAIT + 2 * VLLMS)

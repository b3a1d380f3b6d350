"""How long it takes to receive KV, over real NIXL agents: P and D are processes of this machine.

`python -m tests.programs.transfers [large]` reads `<receives> <blocks>` lines and answers each with
nanoseconds: from the moment in which D's scheduler begins to decide on so many requests, each with
a prompt of so many blocks that P holds, until it knows of all of them that they have been received.
With K20 that takes what P says of their leases. `scripts.bench.pairs` keeps such processes on the
stock and on the patched files and asks them in turns.

Both engines are the release's scheduler, connector and worker without a model. D steps as the
engine core does, which pauses for 1 ms after a step that computed nothing. P has stepped before D
reads, and steps again when it has; in between only its listener answers.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import socket
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

from tests.support import vllm_cpu

vllm_cpu.prepare()

from tests.support import stand_in_model  # noqa: E402 - the platform comes first

LARGE = "large" in sys.argv[1:]
"""The cache is one of a model of 8 billion parameters: 2 MiB a block, in 64 pieces."""
if LARGE:  # before anybody takes these over
    stand_in_model.HEAD_SIZE, stand_in_model.LAYERS = 128, 32

from tests.support import decode_engine  # noqa: E402 - the size of the cache comes first
from tests.support.idle_engine import IdleEngine  # noqa: E402
from tests.support.nixl_agents import REAL  # noqa: E402
from tests.support.nixl_worker import make_worker  # noqa: E402
from tests.support.offering import answer_handshakes, keep_answers  # noqa: E402

BLOCK = 16
"""Tokens."""
MOST_RECEIVES, MOST_BLOCKS = 8 if LARGE else 64, 64
"""Receives in flight, and blocks of one."""
PAUSE = 0.001
"""Seconds, of the engine core."""
FILL = 3.0
"""What P's caches are full of."""
PATIENCE = 30.0
"""Seconds in which everything has to come to its end."""

Params = dict[str, Any]


class Engine(IdleEngine):
    """An engine over a real agent."""

    def __init__(self, engine_id: str) -> None:
        # Each process has its model's configuration in a folder of its own, which is in the hash.
        extra = {"enforce_handshake_compat": False}

        def over_real_nixl(**named: Any) -> Any:  # noqa: ANN401 - of `make_worker`
            return make_worker(**named, nixl=REAL, engine_id=engine_id, extra_config=extra)

        with mock.patch.object(decode_engine, "make_worker", over_real_nixl):
            super().__init__(block_size=BLOCK, num_blocks=MOST_RECEIVES * (MOST_BLOCKS + 1) + 8)
        self.scheduler.max_num_running_reqs = MOST_RECEIVES
        self.scheduler.max_num_scheduled_tokens = MOST_RECEIVES * MOST_BLOCKS * BLOCK
        self.numbers = iter(range(10**9))

    def settle(self) -> None:
        """Step until there is nothing to do."""
        if not self.run(PATIENCE):
            raise TimeoutError(f"requests go on for {PATIENCE} s")


def prompt(number: int, blocks: int) -> list[int]:
    """A prompt that shares no block with any other."""
    return [(number >> 6 * i) % 64 for i in range(4)] + [1] * (blocks * BLOCK - 4)


# ---------------------------------------------------------------- P


def prefill(commands: Connection) -> None:
    """Be P: compute prompts, and say where they are; step until they have been read."""
    logging.disable(logging.CRITICAL)
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = "127.0.0.1"
    os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(port)
    engine = Engine("P")
    answer_handshakes(engine)
    for cache in engine.worker.device_kv_caches.values():
        cache.fill_(FILL)
    commands.send("ready")
    with contextlib.suppress(EOFError):  # D has ended
        while True:
            numbers, blocks = commands.recv()
            commands.send(list(_answers(engine, numbers, blocks)))
            commands.recv()
            engine.settle()
            commands.send("read")


def _answers(engine: Engine, numbers: Iterable[int], blocks: int) -> Iterator[Params]:
    """The `kv_transfer_params` with which P answers prompts."""
    names = [f"p{number}" for number in numbers]
    scheduler = engine.scheduler
    with mock.patch.object(scheduler, "update_from_output", scheduler.update_from_output):
        answers = keep_answers(engine)  # here alone: what comes after is measured
        for name, number in zip(names, numbers, strict=True):
            engine.send(name, prompt(number, blocks), {"do_remote_decode": True}, max_tokens=1)
        for _ in range(4):  # also tells the worker of the leases
            engine.step()
    for name in names:
        yield answers[name]


# ---------------------------------------------------------------- D


class Decode:
    """D, and the P that it reads from."""

    def __init__(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._p, theirs = spawn.Pipe()
        self._process = spawn.Process(target=prefill, args=(theirs,), daemon=True)
        self._process.start()
        self.engine = Engine("D")
        self._hear("ready")
        self.engine.step()
        self.receive(1, 1)  # shakes hands
        # No model writes here, so what D has is what it has read.
        _expect(all(FILL in cache for cache in self.engine.worker.device_kv_caches.values()))

    def receive(self, count: int, blocks: int) -> int:
        """Receive prompts.

        Returns:
            nanoseconds, until the scheduler knows of all that they are there.
        """
        scheduler = self.engine.scheduler
        numbers = [next(self.engine.numbers) for _ in range(count)]
        self._p.send((numbers, blocks))
        for number, params in zip(numbers, self._p.recv(), strict=True):
            self.engine.send(f"d{number}", prompt(number, blocks), params, max_tokens=1)
        awaited = {f"d{number}" for number in numbers}
        computed = dict.fromkeys(awaited, 0)
        start, spent = time.perf_counter_ns(), 0
        while not spent or scheduler.has_requests():
            step = self.engine.step()
            for req_id, (first, end) in step.computed.items():
                computed[req_id] += end - first
            awaited -= scheduler.finished_recving_kv_req_ids | step.computed.keys()
            if not awaited and not spent:
                spent = time.perf_counter_ns() - start
            if not step.computed:
                time.sleep(PAUSE)
            _expect(time.perf_counter_ns() - start < PATIENCE * 1e9)
        _expect(set(computed.values()) == {1})  # all others came from P
        self._p.send("read them")
        self._hear("read")
        return spent

    def _hear(self, word: str) -> None:
        _expect(self._p.recv() == word)


def _expect(as_asked: bool) -> None:
    if not as_asked:
        raise RuntimeError("what was measured is not what was asked for")


def main() -> None:
    """Answer questions until the input ends."""
    logging.disable(logging.CRITICAL)
    d = Decode()
    print("ready", flush=True)
    for line in sys.stdin:
        count, blocks = map(int, line.split())
        gc.collect()
        gc.disable()
        turns = 20 if count == 1 else 3
        samples = [d.receive(count, blocks) for _ in range(turns)]
        gc.enable()
        print(statistics.median(samples), flush=True)


if __name__ == "__main__":
    main()

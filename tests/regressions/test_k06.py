"""K06: a lease deadline means the same on every node.

The scheduler of a prefill engine and its workers may run on different machines, whose
`time.perf_counter` have nothing to do with each other. Here the worker is a process of its own
with a clock that is hours off, and the scheduler's metadata reaches it pickled, as vLLM's
executors send it.
"""

from __future__ import annotations

import multiprocessing
import pickle
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from tests.support.harness import HarnessError
from tests.support.nixl_release import NixlConnectorMetadata
from tests.support.nixl_worker import make_worker, stamp

LEASE = 480.0
HOUR = 3600.0


def clock_of_another_machine(offset: float) -> Callable[[], float]:
    own = time.perf_counter
    return lambda: own() + offset


def work(offset: float, pipe: Any) -> None:  # noqa: ANN401 - one end of a pipe
    """The worker's process: which requests it lets go at once, and shortly before and after the
    lease ends."""
    clock = clock_of_another_machine(offset)
    with mock.patch("time.perf_counter", clock):
        worker = make_worker(engine_id="P")
        worker.start_load_kv(pickle.loads(pipe.recv_bytes()))  # noqa: S301 - from our parent
        at_once = worker.get_finished()[0]
    with mock.patch("time.perf_counter", lambda: clock() + LEASE - 60):
        before = worker.get_finished()[0]
    with mock.patch("time.perf_counter", lambda: clock() + LEASE + 60):
        after = worker.get_finished()[0]
    pipe.send((at_once, before, after))


def metadata_of_a_finished_prefill() -> NixlConnectorMetadata:
    """What the scheduler of a prefill engine hands to its workers."""
    metadata = NixlConnectorMetadata()
    metadata.reqs_in_batch.add("req-p")
    metadata.reqs_to_send["req-p"] = time.perf_counter() + LEASE
    return stamp(metadata)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("hours", [-5.0, 5.0])
def test_worker_whose_clock_is_hours_off(hours: float) -> None:
    # Forked, because importing vLLM once is enough; before anything here has a thread.
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe()
    process = fork.Process(target=work, args=(hours * HOUR, there), daemon=True)
    process.start()
    try:
        here.send_bytes(pickle.dumps(metadata_of_a_finished_prefill(), pickle.HIGHEST_PROTOCOL))
        if not here.poll(60):
            raise HarnessError("the worker's process said nothing for 60 s", "what it lets go")
        at_once, before, after = here.recv()
    finally:
        process.kill()
        process.join()
    assert at_once == set(), "the lease ended before it began"
    assert before == set()
    assert after == {"req-p"}, "the lease lasts for hours"

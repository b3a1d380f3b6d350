"""How long a decode worker's two calls in each engine step take, when nothing fails.

`python -m tests.programs.hot_path` reads `<call> <requests>` lines and answers each with
nanoseconds per call. `scripts.bench.worker` keeps one such process on the stock files and one on
the patched files and asks them in turns. Calls:

- `get_finished N`: N receives are in flight, none of them ends;
- `start_load_kv N`: N receives start, of connected engines (0: an engine step without any).
"""

from __future__ import annotations

import gc
import itertools
import logging
import statistics
import sys
import time
from collections.abc import Callable

from tests.support import vllm_cpu

vllm_cpu.prepare()


from tests.support.nixl_release import NixlConnectorMetadata, NixlConnectorWorker  # noqa: E402
from tests.support.nixl_worker import ScriptedNixl, connect, make_worker, receive  # noqa: E402

_SECONDS = 0.1  # measured for each question


class _InstantNixl(ScriptedNixl):
    """Answers the calls of the hot path at once, so that the worker's own time counts.

    Attributes:
        state_of_all: what every read is in.
        posted: how many reads were posted.
    """

    state_of_all = "PROC"
    posted = 0

    def __init__(self) -> None:
        super().__init__("bench")
        self._numbers = itertools.count(1)

    def make_prepped_xfer(self, *_: object, **__: object) -> int:
        return next(self._numbers)

    def transfer(self, handle: int) -> str:
        self.posted += 1
        return "PROC"

    def check_xfer_state(self, handle: int) -> str:
        return self.state_of_all

    def release_xfer_handle(self, handle: int) -> None:
        pass

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        return {}


def _worker() -> tuple[NixlConnectorWorker, _InstantNixl]:
    worker = make_worker()
    connect(worker, "P")
    nixl = _InstantNixl()
    worker.nixl_wrapper = nixl
    return worker, nixl


def _requests(count: int) -> NixlConnectorMetadata:
    metadata = NixlConnectorMetadata()
    for number in range(count):
        metadata.add_new_req_to_recv(
            request_id=f"d{number}",
            local_block_ids=([1, 2, 3, 4],),
            kv_transfer_params={
                "remote_block_ids": ([1, 2, 3, 4],),
                "remote_engine_id": "P",
                "remote_request_id": f"p{number}",
                "remote_host": "127.0.0.1",
                "remote_port": 1,
                "tp_size": 1,
            },
        )
    return metadata


def _get_finished(count: int) -> Callable[[], int]:
    worker, nixl = _worker()
    for number in range(count):
        receive(worker, f"d{number}")
    _expect(nixl.posted == count)

    def measure() -> int:
        start = time.perf_counter_ns()
        worker.get_finished()
        return time.perf_counter_ns() - start

    return measure


def _start_load_kv(count: int) -> Callable[[], int]:
    worker, nixl = _worker()

    def measure() -> int:
        metadata = _requests(count)
        start = time.perf_counter_ns()
        worker.start_load_kv(metadata)
        spent = time.perf_counter_ns() - start
        nixl.state_of_all = "DONE"
        _, received = worker.get_finished()
        nixl.state_of_all = "PROC"
        _expect(len(received) == count and nixl.posted == count)
        nixl.posted = 0
        return spent

    return measure


def _expect(as_asked: bool) -> None:
    if not as_asked:
        raise RuntimeError("what was measured is not what was asked for")


def main() -> None:
    """Answer questions until the input ends."""
    logging.disable(logging.CRITICAL)
    makers = {"get_finished": _get_finished, "start_load_kv": _start_load_kv}
    measures: dict[str, Callable[[], int]] = {}
    print("ready", flush=True)
    for line in sys.stdin:
        call, count = line.split()
        if line not in measures:
            measures[line] = makers[call](int(count))
        measure = measures[line]
        gc.collect()
        gc.disable()
        end = time.perf_counter() + _SECONDS
        samples = [measure()]
        while time.perf_counter() < end:
            samples.append(measure())
        gc.enable()
        print(statistics.median(samples), flush=True)


if __name__ == "__main__":
    main()

"""How long what each engine step calls takes, of worker and scheduler, when nothing fails.

`python -m tests.programs.hot_path` reads `<call> <requests>` lines and answers each with
nanoseconds per call. `scripts.bench.pairs` keeps one such process on the stock files and one on
the patched files and asks them in turns. Calls:

- `get_finished N`: N receives are in flight, none of them ends;
- `start_load_kv N`: N receives start, of connected engines (0: an engine step without any);
- `running N`: the scheduler decides on a step of N requests that decode, and ends the last one;
- `receiving N`: the same while N requests wait for the KV that they receive, and one decodes.
"""

from __future__ import annotations

import gc
import itertools
import logging
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

from tests.support import vllm_cpu

vllm_cpu.prepare()


from vllm.v1.core.sched.output import SchedulerOutput  # noqa: E402
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput  # noqa: E402

from tests.support.decode_engine import TOKEN  # noqa: E402
from tests.support.nixl_release import NixlConnectorMetadata, NixlConnectorWorker  # noqa: E402
from tests.support.nixl_worker import ScriptedNixl, connect, make_worker, receive  # noqa: E402
from tests.support.prefill_engine import PrefillEngine  # noqa: E402

_SECONDS = 0.1  # measured for each question
_LENGTH = 512  # tokens of a request, of its prompt or of its answer


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


def _stepping(count: int, *, receives: bool) -> Callable[[], int]:
    """Two steps overlap, as with async scheduling, the default."""
    blocks = _LENGTH // 16 + 1
    engine = PrefillEngine(num_blocks=blocks * (count + 2))
    scheduler = engine.scheduler
    scheduler.max_num_running_reqs = scheduler.max_num_scheduled_tokens = count + 16
    names = itertools.count()
    for number in range(count if receives else 0):
        engine.ask(f"received-{number}", range(_LENGTH), [list(range(blocks - 1))])
    decoding = 1 if receives else count
    last: SchedulerOutput | None = None

    def step() -> int:
        nonlocal last
        start = time.perf_counter_ns()
        decided = scheduler.schedule()
        spent = time.perf_counter_ns() - start
        ended, last = last, decided
        if ended is None:
            return spent
        ids = list(ended.num_scheduled_tokens)
        output = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={req_id: index for index, req_id in enumerate(ids)},
            sampled_token_ids=[[TOKEN]] * len(ids),
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=None,
            kv_connector_output=KVConnectorOutput(),
        )
        start = time.perf_counter_ns()
        scheduler.update_from_output(ended, output)
        return spent + time.perf_counter_ns() - start

    def measure() -> int:
        if not scheduler.running:
            for _ in range(decoding):
                engine.send(f"decodes-{next(names)}", [1], None, max_tokens=_LENGTH)
            for _ in range(3):
                step()
            _expect(len(scheduler.running) == decoding)
        return step()

    return measure


def _expect(as_asked: bool) -> None:
    if not as_asked:
        raise RuntimeError("what was measured is not what was asked for")


def main() -> None:
    """Answer questions until the input ends."""
    logging.disable(logging.CRITICAL)
    makers: dict[str, Callable[[int], Callable[[], int]]] = {
        "get_finished": _get_finished,
        "start_load_kv": _start_load_kv,
        "running": partial(_stepping, receives=False),
        "receiving": partial(_stepping, receives=True),
    }
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

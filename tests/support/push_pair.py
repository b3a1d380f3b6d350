"""P and D where P writes into D's blocks (`NixlPushConnector`): whole engines, NIXL scripted.

Each engine is vLLM's own scheduler and push worker, with the worker's thread that pushes; each
listens on the loopback interface, so handshakes are real. Between them lies the wire, which is the
test's: `Pair.carry` takes words from one to the other and carries P's writes out on D's memory, to
the byte. There is no model: what a prompt's KV would be is written into P's cache by `Pair.prefill`
and looked up in D's by `misplaced`.

    with pair() as wire:
        offer = wire.prefill("asked", PROMPT)
        wire.d.send("asked", PROMPT, offer)
        assert wire.until(lambda: wire.d.computed("asked"))
        assert misplaced(wire.d, "asked", PROMPT) == []

A request has one name on P and on D: P pairs what D registers by it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import NixlPushConnectorWorker
from vllm.v1.request import RequestStatus

from tests.support import decode_engine
from tests.support.decode_engine import DecodeEngine, Step
from tests.support.harness import HarnessError, building
from tests.support.nixl_worker import Read, lives, make_worker, nixl_of
from tests.support.offering import keep_answers, listen, scheduler_part

SECONDS = 8.0
"""In which a pair comes to its end. A handshake with nobody takes 5."""


class PushEngine(DecodeEngine):
    """An engine that pushes, or is pushed to.

    Attributes:
        answers: request id -> the `kv_transfer_params` that its client was answered with.
        steps: those that were taken, oldest first.
    """

    @building("an engine that pushes")
    def __init__(
        self,
        engine_id: str,
        *,
        lease: float = 30.0,
        worker: dict[str, Any] | None = None,
        **config: Any,  # noqa: ANN401 - of `DecodeEngine`
    ) -> None:
        changed = {
            "engine_id": engine_id,
            "worker_class": NixlPushConnectorWorker,
            "connector": "NixlPushConnector",
            **(worker or {}),
        }
        made = functools.partial(_make, changed)
        with mock.patch.object(decode_engine, "make_worker", made):
            super().__init__(**config)
        self.answers = keep_answers(self)
        self.steps: list[Step] = []
        listen(self, lease)

    @property
    def part(self) -> Any:  # noqa: ANN401 - NIXL's part of the scheduler
        """NIXL's part of the scheduler."""
        return scheduler_part(self)

    @property
    def agent(self) -> str:
        """What NIXL calls its worker."""
        return nixl_of(self.worker).name

    @property
    def ended(self) -> dict[str, str]:
        """Request id -> why it ended."""
        return {req_id: why for step in self.steps for req_id, why in step.finished.items()}

    def computed(self, req_id: str) -> int:
        """How many tokens of a request it has computed."""
        found = [step.computed.get(req_id, (0, 0)) for step in self.steps]
        return sum(end - start for start, end in found)

    def step(self) -> Step:
        """Run one step of the engine; see `DecodeEngine.step`."""
        self.steps.append(super().step())
        return self.steps[-1]

    def leave(self, req_id: str) -> None:
        """A client leaves."""
        lives(self.scheduler.finish_requests, req_id, RequestStatus.FINISHED_ABORTED)

    @property
    def listens(self) -> bool:
        """Whether the thread that answers handshakes lives."""
        thread: threading.Thread | None = self.part._nixl_handshake_listener_t
        return thread is not None and thread.is_alive()

    def end(self) -> None:
        """Its processes are gone, as far as it matters to others."""
        self.part._stop_event.set()  # its thread sees that within a second
        nixl_of(self.worker).on.clear()
        worker: Any = self.worker
        worker._push_writer_stop.set()
        worker._push_writer_wake.set()
        # Were its thread the last to hold the worker, upstream's `__del__` would run in it, and
        # wait for the thread that it runs in.
        worker._push_writer_thread.join(SECONDS)
        # Without it a worker has nothing to shut down when it is collected: that is not for here.
        executor = vars(worker).pop("_handshake_initiation_executor", None)
        if executor is not None:
            executor.shutdown(wait=False, cancel_futures=True)


def _make(changed: dict[str, Any], **config: Any) -> Any:  # noqa: ANN401 - of `make_worker`
    return make_worker(**{**config, **changed})


class Pair:
    """P, D, and the wire between them.

    Attributes:
        p, d: the engines; a test may put another in a place, as when one is restarted.
        holds: whether P's writes stay under way.
    """

    def __init__(self, p: PushEngine, d: PushEngine) -> None:
        self.p, self.d = p, d
        self.holds = False

    def prefill(
        self,
        req_id: str,
        prompt: Sequence[int],
        *,
        max_tokens: int = 1,
        **sampling: Any,  # noqa: ANN401
    ) -> dict[str, Any]:
        """Have P compute a prompt; its KV is in P's cache, for each token what `values` has.

        Returns:
            The parameters with which D is asked to receive it.
        """
        self.p.send(req_id, prompt, {"do_remote_decode": True}, max_tokens=max_tokens, **sampling)
        for _ in range(max_tokens + 1):
            self.p.step()
        if req_id not in self.p.answers:
            raise HarnessError(f"no answer to {req_id}", "one, as P has computed the prompt")
        answer = self.p.answers[req_id]
        fill(self.p.worker, list(answer["remote_block_ids"][0]), prompt)
        return dict(answer)

    def writes(self) -> list[Read]:
        """P's writes that may still read from its blocks."""
        return nixl_of(self.p.worker).in_flight()

    def carry(self) -> None:
        """Take what was said to the other side, and carry out the writes that were begun."""
        nixl = nixl_of(self.p.worker)
        if not self.holds:
            for write in self.writes():
                move(self.p.worker, write)
                nixl.finish(write)
        for sender, receiver in ((self.p, self.d), (self.d, self.p)):
            inbox = nixl_of(receiver.worker)
            if not inbox.inbox:  # its thread takes them when it looks
                said = nixl_of(sender.worker).heard.pop(receiver.agent, [])
                if said:
                    inbox.inbox = {sender.agent: said}

    def turn(self) -> None:
        """Let each take a step, and the wire carry what there is."""
        self.p.step()
        self.d.step()
        self.carry()

    def until(self, done: Callable[[], object], seconds: float = SECONDS) -> bool:
        """Take turns until it is done, for so long at most; whether it is."""
        end = time.monotonic() + seconds
        while not done() and time.monotonic() < end:
            self.turn()
            time.sleep(0.002)
        return bool(done())


@contextlib.contextmanager
def pair(
    p: dict[str, Any] | None = None,
    d: dict[str, Any] | None = None,
    **both: Any,  # noqa: ANN401 - of `PushEngine`
) -> Iterator[Pair]:
    """P and D until the end of the block; `p` and `d` are for one of them."""
    engines: list[PushEngine] = []
    try:
        for name, own in (("P", p), ("D", d)):
            engines.append(PushEngine(name, **both, **(own or {})))
        yield Pair(*engines)
    finally:
        for engine in engines:
            engine.end()


# ---------------------------------------------------------------- what is where


def by_token(worker: Any) -> torch.Tensor:  # noqa: ANN401
    """A layer's cache as kernel blocks, tokens, and what there is of each; written through."""
    cache: torch.Tensor = next(iter(worker.device_kv_caches.values()))
    if cache.dim() == 5 and worker._has_mamba:  # blocks, keys and values, heads, tokens, elements
        return cache.permute(0, 3, 1, 2, 4)
    if cache.dim() == 5:  # keys and values, blocks, tokens, heads, elements
        return cache.permute(1, 2, 0, 3, 4)
    return cache.transpose(1, 2)  # blocks, heads, tokens, keys and values of each


def slots(worker: Any, blocks: Sequence[int]) -> torch.Tensor:  # noqa: ANN401
    """The tokens in these logical blocks, in order: one row for each, of a layer."""
    return by_token(worker)[_kernel_blocks(worker, blocks)].flatten(0, 1).flatten(1)


def _kernel_blocks(worker: Any, blocks: Sequence[int]) -> list[int]:  # noqa: ANN401
    ratio = worker._physical_blocks_per_logical_kv_block
    return [b * ratio + i for b in blocks for i in range(ratio)]


def fill(worker: Any, blocks: Sequence[int], tokens: Sequence[int]) -> None:  # noqa: ANN401
    """Write what a prompt's tokens leave behind into these logical blocks, and junk after it."""
    cache, kernel = by_token(worker), _kernel_blocks(worker, blocks)
    size = cache.shape[1]
    for slot in range(len(kernel) * size):
        value = tokens[slot] + 1 if slot < len(tokens) else -1
        cache[kernel[slot // size], slot % size] = value


def misplaced(engine: PushEngine, req_id: str, tokens: Sequence[int], hit: int = 0) -> list[int]:
    """The tokens from `hit` on whose KV is not in its place among a request's blocks."""
    [blocks, *_] = engine.scheduler.kv_cache_manager.get_block_ids(req_id)
    there = slots(engine.worker, blocks)
    return [i for i in range(hit, len(tokens)) if not bool((there[i] == tokens[i] + 1).all())]


def move(worker: Any, write: Read) -> None:  # noqa: ANN401
    """Copy the bytes of a write, as NIXL does."""
    nixl = nixl_of(worker)
    mine, yours = (nixl._descs[side] for side in write.sides)
    for source_id, target_id in zip(write.local, write.remote, strict=True):
        (origin, size, _), (target, offered, _) = mine[source_id], yours[target_id]
        if size != offered:
            raise HarnessError(f"a write of {size} bytes into {offered}", "blocks of one size")
        ctypes.memmove(int(target), int(origin), int(size))

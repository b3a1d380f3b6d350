"""The side channel of a scripted prefill server: a real socket on the loopback interface.

`tests.support.nixl_worker` scripts NIXL itself; this is where handshakes ask first, over ZeroMQ.
With it a worker's own `_nixl_handshake` runs, time-outs included.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import msgspec
import zmq

from tests.support import nixl_worker
from tests.support.hurried_clock import Clock
from tests.support.nixl_release import NixlConnectorWorker, NixlHandshakePayload
from tests.support.nixl_worker import make_worker, nixl_of, peer_metadata, receive, step

SOON = 3.0
"""Seconds; a rank that does not answer takes a handshake 5."""


class SideChannel:
    """Where an engine listens for handshakes; a context manager.

    Attributes:
        messages: what peers have sent.
        asked: the ranks that were asked for, in order; each is answered if `answers` says so.
    """

    host = "127.0.0.1"

    def __init__(
        self,
        worker: NixlConnectorWorker,
        engine_id: str = "P",
        tp_size: int = 1,
        answers: Callable[[int], bool] = lambda rank: True,
    ) -> None:
        self.messages: list[bytes] = []
        self.asked: list[int] = []
        self._describe: Callable[[int], bytes] = lambda rank: _payload(
            worker, engine_id, rank, tp_size
        )
        self._answers = answers
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self.port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)

    def __enter__(self) -> SideChannel:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _listen(self) -> None:
        unanswered: list[list[bytes]] = []
        while not self._over.is_set():
            if not self._socket.poll(20):
                continue
            identity, _, question = self._socket.recv_multipart()
            self.messages.append(question)
            _, *place = msgspec.msgpack.decode(question)
            self.asked.append(place[-1])
            # With a pipeline rank comes the time of the peer's clock.
            clock = [msgspec.msgpack.encode(time.perf_counter())] if len(place) > 1 else []
            if self._answers(place[-1]):
                self._socket.send_multipart([identity, b"", self._describe(place[-1]), *clock])
            else:
                unanswered.append([identity, b"", b"", *clock])
        for answer in unanswered:  # that nobody waits longer than the test
            self._socket.send_multipart(answer)
        time.sleep(0.05 if unanswered else 0)


def _payload(worker: NixlConnectorWorker, engine_id: str, rank: int, tp_size: int) -> bytes:
    payload: Any = NixlHandshakePayload(
        compatibility_hash=worker.compat_hash,
        agent_metadata_bytes=msgspec.msgpack.encode(
            peer_metadata(worker, engine_id, rank, tp_size)
        ),
    )
    encoded: bytes = msgspec.msgpack.encode(payload)
    return encoded


class Fleet:
    """A decode worker, and where the prefill servers of its requests listen; a context manager.

    What it is called with, apart from `hurried`, is for `make_worker`.

    Attributes:
        worker: the decode worker, with its own `_nixl_handshake`.
        ports: engine id -> where it listens, as requests say.
        now: the time in seconds; servers that are `silent` put it forward where the fleet is
            `hurried`, instead of being waited for: from the first `until` on, which counts it.
    """

    def __init__(self, *, hurried: bool = False, **config: Any) -> None:  # noqa: ANN401
        self.worker = make_worker(**config)
        self.ports: dict[str, int] = {}
        self._silent: set[str] = set()
        self._stack = contextlib.ExitStack()
        self._clock = Clock() if hurried else None
        self.now: Callable[[], float] = self._clock.now if self._clock else time.monotonic

    def __enter__(self) -> Fleet:
        if self._clock:
            self._clock.runs.clear()
            hurries = self._clock.hurries(lambda path: path.rpartition(":")[2] in self._silent)
            self._stack.enter_context(hurries)
        self._stack.enter_context(
            mock.patch.object(nixl_worker, "peer_port", self.ports.__getitem__)
        )
        return self

    def __exit__(self, *_: object) -> None:
        if self._clock:
            self._clock.runs.set()
        self._stack.close()
        # What still waits in line would keep the process from ending.
        self.worker._handshake_initiation_executor.shutdown(wait=False, cancel_futures=True)

    def serve(
        self, engine_id: str, tp_size: int = 1, answers: Callable[[int], bool] = lambda _: True
    ) -> SideChannel:
        """Let an engine listen; requests that name it from now on name this place."""
        place = SideChannel(self.worker, engine_id, tp_size, answers)
        self._stack.enter_context(place)
        self.ports[engine_id] = place.port
        if answers is silent:
            self._silent.add(str(place.port))
        return place

    def leave(self, req_id: str, engine_id: str, tp_size: int = 1) -> None:
        """A request ends without reading its blocks: rejected, or aborted in the queue."""
        receive(
            self.worker,
            req_id,
            local_blocks=(),
            remote_request_id=f"{req_id}-at-p",
            engine_id=engine_id,
            tp_size=tp_size,
        )

    def read(self, engine_id: str = "P", req_id: str = "good", tp_size: int = 1) -> None:
        receive(
            self.worker,
            req_id,
            engine_id=engine_id,
            remote_request_id=f"{req_id}-at-p",
            tp_size=tp_size,
        )

    def until(self, done: Callable[[], object], seconds: float = SOON) -> bool:
        """Step until it is done, for so long at most."""
        end = self.now() + seconds
        if self._clock:
            self._clock.runs.set()
        while not done() and self.now() < end:
            time.sleep(0.005)
            step(self.worker)
        return bool(done()) and self.now() < end

    def reads(self) -> list[str]:
        return [read.agent for read in nixl_of(self.worker).reads]

    def heard(self) -> dict[str, list[bytes]]:
        return dict(nixl_of(self.worker).heard)


def silent(_: int) -> bool:
    """What a rank that does not answer says."""
    return False

"""Where engines ask each other who they are: the release's own code at both ends, without sockets.

The listener that a scheduler's side of the connector would run in a thread runs here once for each
question, and answers it. The handshake of a worker, which asks, runs when the history says so.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import zmq

from tests.simulation.clock import Clock

lease_questions: Any
try:
    from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl import lease_questions
except ModuleNotFoundError:  # stock
    lease_questions = None


class _NothingMoreError(BaseException):
    """Ends a listener's loop; nothing in the release catches it."""


class Listener:
    """Stands in for the thread of a listener: `threading.Thread` where the listener is started."""

    def __init__(self, target: Callable[..., None], args: tuple[Any, ...], **_: Any) -> None:  # noqa: ANN401
        self._target, self._args = target, args
        self.failed: Exception | None = None
        self._question: list[bytes] = []
        self._answer: list[bytes] | None = None

    def start(self) -> None:
        for arg in self._args:
            # It says that it is ready; the event that asks it to stop is not for here.
            if isinstance(arg, threading.Event):
                arg.set()
                break

    def is_alive(self) -> bool:
        return self.failed is None

    def join(self, timeout: float | None = None) -> None:
        pass

    def ask(self, question: list[bytes], module: Any) -> list[bytes]:  # noqa: ANN401
        """What it answers to these frames; `module` is where the listener finds `zmq_ctx`.

        Raises:
            zmq.Again: it does not answer.
        """
        if self.failed is not None:
            raise zmq.Again
        self._question, self._answer = [b"peer", *question], None
        usual = module.zmq_ctx
        module.zmq_ctx = lambda *_: contextlib.nullcontext(self)
        try:
            self._target(*self._args)
        except _NothingMoreError:
            pass
        except Exception as error:  # the thread would be gone
            self.failed = error
        finally:
            module.zmq_ctx = usual
        if self._answer is None:
            raise zmq.Again
        return self._answer

    # The socket of the listener.

    def setsockopt(self, *_: object) -> None:
        pass

    def recv_multipart(self) -> list[bytes]:
        if not self._question:
            raise _NothingMoreError
        question, self._question = self._question, []
        return question

    def send_multipart(self, parts: tuple[bytes, ...]) -> None:
        self._answer = list(parts[1:])


class Question:
    """The socket of the one who asks.

    `reach` gives what answers at a path; it raises `zmq.Again` where nobody does.
    """

    def __init__(self, path: str, reach: Callable[[str, list[bytes]], list[bytes]]) -> None:
        self._path, self._reach = path, reach
        self._said = b""

    def setsockopt(self, *_: object) -> None:
        pass

    def send(self, message: bytes) -> None:
        self._said = message

    def recv_multipart(self) -> list[bytes]:
        return self._reach(self._path, [b"", self._said])[1:]

    def recv(self) -> bytes:
        return self.recv_multipart()[0]


class LeaseTalk:
    """Stands in for K20's sockets: what D's scheduler asks about a lease is a job of its place."""

    def __init__(self, jobs: Jobs, reach: Callable[[str, list[bytes]], list[bytes]]) -> None:
        self._jobs, self._reach = jobs, reach
        self._replies: deque[Any] = deque()

    def ask(self, peer: Any, question: Any) -> None:  # noqa: ANN401 - the overlay's
        self._jobs.submit(self._talk, peer, question)

    def replies(self) -> Iterator[Any]:
        while self._replies:
            yield self._replies.popleft()

    def _talk(self, peer: Any, question: Any) -> None:  # noqa: ANN401
        frames = list(lease_questions.question_frames(question))
        reply = lease_questions.read_reply(self._reach(f"tcp://{peer.host}:{peer.port}", frames))
        if reply is not None:
            self._replies.append(reply)


class Jobs:
    """Stands in for a `ThreadPoolExecutor` with one thread: jobs run when the history says.

    They run between two steps of their engine, on its thread, never within one.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock, self.place = clock, clock.here
        self._jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    def submit(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:  # noqa: ANN401
        future: Future[Any] = Future()
        self._jobs.append((future, lambda: function(*args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._jobs.clear()

    def __len__(self) -> int:
        return len(self._jobs)

    def run(self, breaks: Exception | None = None) -> None:
        """Run the oldest job; with `breaks`, it ends so instead."""
        future, job = self._jobs.popleft()
        with self._clock.at(self.place):
            if not future.set_running_or_notify_cancel():
                return
            try:
                if breaks is not None:
                    raise breaks
                result = job()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

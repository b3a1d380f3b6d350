"""Peers that do not answer, without waiting 5 s for each: time is put forward instead."""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import zmq

from tests.support import nixl_worker

SILENCE = 0.002
"""Seconds that are really waited for a rank that does not answer, and those of vLLM:"""
VLLMS = 5.0

LINE = "vllm-nixl-handshake-initiator"
"""The thread that shakes hands for reads, and the one of K12:"""
NOTIFIER = "kvfix-nixl-notifier"

_OVERLAY = "vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl"


class Clock:
    """Time as it would be if the silent were waited for as long as vLLM does.

    Attributes:
        runs: Nothing is hurried while this is not set: a handshake with the silent waits for it.
    """

    def __init__(self) -> None:
        self.runs = threading.Event()
        self.runs.set()
        self._lost: Counter[str] = Counter()
        self._here = threading.local()

    def now(self, thread: str = LINE) -> float:
        """Seconds for a thread that shakes hands, and whoever waits for it."""
        return time.monotonic() + VLLMS * self._lost[thread]

    @contextlib.contextmanager
    def hurries(self, silent: Callable[[str], bool]) -> Iterator[None]:
        """Have handshakes be hurried with the addresses (`tcp://host:port`) that are `silent`."""
        module, set_option = nixl_worker._MODULE, zmq.Socket.setsockopt
        connected = module.zmq_ctx

        def setsockopt(socket: Any, option: int, value: Any) -> None:  # noqa: ANN401
            hurry = option == zmq.RCVTIMEO and getattr(self._here, "hurry", False)
            set_option(socket, option, int(SILENCE * 1000) if hurry else value)

        @contextlib.contextmanager
        def zmq_ctx(kind: object, path: str) -> Iterator[object]:
            self._here.hurry = silent(path)
            if self._here.hurry:
                self.runs.wait()
            try:
                with connected(kind, path) as socket:
                    yield socket
            except zmq.Again:
                self._lost[threading.current_thread().name.rsplit("_", 1)[0]] += 1
                raise
            finally:
                self._here.hurry = False

        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(zmq.Socket, "setsockopt", setsockopt))
            stack.enter_context(mock.patch.object(module, "zmq_ctx", zmq_ctx))
            for name, thread in (("handshake_line", LINE), ("notifications", NOTIFIER)):
                with contextlib.suppress(ModuleNotFoundError):  # stock
                    overlay = importlib.import_module(f"{_OVERLAY}.{name}")
                    clock = SimpleNamespace(monotonic=functools.partial(self.now, thread))
                    stack.enter_context(mock.patch.object(overlay, "time", clock))
            yield

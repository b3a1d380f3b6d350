"""Forked processes, some at a time, each of which says what it is at and is ended when it hangs."""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HUNG = "hung"
DIED = "died"

Say = Callable[[float], None]
"""Says that what comes next should take no longer than so many seconds."""


@dataclass
class _Child:
    task: Any
    pid: int
    pipe: int
    folder: Path
    deadline: float
    said: bytes = b""


@dataclass
class Children:
    """Runs tasks in forks of this process.

    Attributes:
        work: What a child does; it returns what JSON can say.
        workers: How many run at a time.
        first_limit: Seconds until a child must have said something.
    """

    work: Callable[[Any, Say], Any]
    workers: int
    first_limit: float = 60.0
    _running: dict[int, _Child] = field(default_factory=dict)

    def run(self, tasks: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        """Yield each task with what its child returned, in the order in which they end.

        A child that is silent for longer than it said is killed, with all that it has started:
        `HUNG`. One that ends without an answer: `DIED`.

        Raises:
            RuntimeError: The work itself raised something.
        """
        pending = iter(tasks)
        with selectors.DefaultSelector() as selector:
            try:
                while True:
                    while len(self._running) < self.workers:
                        try:
                            task = next(pending)
                        except StopIteration:
                            break
                        child = self._start(task)
                        selector.register(child.pipe, selectors.EVENT_READ, child)
                        self._running[child.pid] = child
                    if not self._running:
                        return
                    for child, answer in list(self._wait(selector)):
                        selector.unregister(child.pipe)
                        self._end(child)
                        yield child.task, answer
            finally:
                for child in list(self._running.values()):
                    self._end(child)

    def _start(self, task: object) -> _Child:
        folder = Path(tempfile.mkdtemp(prefix="kvm-"))
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            self._be_child(task, write, folder)
        os.close(write)
        return _Child(task, pid, read, folder, time.monotonic() + self.first_limit)

    def _be_child(self, task: object, pipe: int, folder: Path) -> None:
        """Do the work, answer, and end without a word to anybody else's output."""
        status = 1
        try:
            os.setsid()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            silence = os.open(folder / "output", os.O_WRONLY | os.O_CREAT)
            os.dup2(silence, 1)
            os.dup2(silence, 2)
            tempfile.tempdir = str(folder)
            os.environ.update(TMPDIR=str(folder), PYTEST_DEBUG_TEMPROOT=str(folder))

            def say(seconds: float) -> None:
                os.write(pipe, f"{seconds:.1f}\n".encode())

            try:
                said = "=" + json.dumps(self.work(task, say))
            except Exception:
                said = "!" + json.dumps(traceback.format_exc())
            text = f"{said}\n".encode()
            while text:
                text = text[os.write(pipe, text) :]
            status = 0
        finally:
            os._exit(status)

    def _wait(self, selector: selectors.BaseSelector) -> Iterator[tuple[_Child, Any]]:
        """Yield the children that have answered, died, or were silent for too long."""
        next_deadline = min(child.deadline for child in self._running.values())
        ended = set()
        for key, _ in selector.select(max(0.0, next_deadline - time.monotonic())):
            child: _Child = key.data
            data = os.read(child.pipe, 1 << 16)
            child.said += data
            *lines, rest = child.said.split(b"\n")
            if lines and lines[-1].startswith(b"!"):
                raise RuntimeError(f"{child.task!r:.200}:\n{json.loads(lines[-1][1:])}")
            if lines and lines[-1].startswith(b"="):
                ended.add(child.pid)
                yield child, json.loads(lines[-1][1:])
            elif not data:
                ended.add(child.pid)
                yield child, DIED
            else:
                if lines:
                    child.deadline = time.monotonic() + float(lines[-1])
                child.said = rest
        now = time.monotonic()
        for child in list(self._running.values()):
            if child.deadline < now and child.pid not in ended:  # late, but not silent
                yield child, HUNG

    def _end(self, child: _Child) -> None:
        del self._running[child.pid]
        for kill in (os.killpg, os.kill):  # it may not have a group of its own yet
            with suppress(ProcessLookupError):
                kill(child.pid, signal.SIGKILL)
        os.waitpid(child.pid, 0)
        os.close(child.pipe)
        shutil.rmtree(child.folder, ignore_errors=True)

"""What a server needs of the machine: cores of its own, free ports, an end."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path

from tests.support.harness import HarnessError


def cores(first: int, count: int = 1) -> str:
    """Return real cores for the threads of `count` workers, as vLLM's CPU binding reads them.

    Args:
        first: Which server this is, counted from 0: servers get other cores while there are any.
        count: Its workers on this machine.
    """
    own = sorted(os.sched_getaffinity(0))
    return "|".join(str(own[(first + n) % len(own)]) for n in range(count))


_PORTS = iter(random.sample(range(20_000, 32_768), 10_000))
"""Below those that Linux gives to outgoing connections: one of these would take a port between here
and the start of its server. None is given twice."""


def free_ports(count: int) -> list[int]:
    """Return `count` ports of the loopback interface that nobody uses."""
    return list(islice(filter(_is_free, _PORTS), count))


def _is_free(port: int) -> bool:
    with socket.socket() as one, suppress(OSError):
        one.bind(("127.0.0.1", port))
        return True
    return False


class Group:
    """A program and all that it starts, as a process group whose end is certain.

    A small shell leads the group. It kills it when the program ends, and when the process that
    made this object is gone, however that came about.
    """

    # Runs its words; when they end, or its standard input does, all of the group is killed.
    _LEADER = '("$@" </dev/null; kill -KILL 0) & read _; kill -KILL 0'

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """Start `words` with `environment` over this process's own; `log` is made anew."""
        log.parent.mkdir(parents=True, exist_ok=True)
        # No session of its own: Linux 6.18 schedules each session as a group (autogroup), and was
        # seen to give all of a core to one group, and nothing to the others there, for minutes.
        with log.open("wb") as file:
            self._leader = subprocess.Popen(
                ["/bin/sh", "-c", self._LEADER, "sh", *words],
                cwd=log.parent,
                env={**os.environ, **environment},
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                preexec_fn=os.setpgrp,  # `process_group` comes with 3.11
            )

    @property
    def alive(self) -> bool:
        """Whether the program has not ended."""
        return self._leader.poll() is None

    def stop(self, patience: float = 10.0) -> None:
        """Ask the group to end, and kill what has not ended after `patience` seconds."""
        deadline = time.monotonic() + patience
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGTERM)
        while self._lives() and time.monotonic() < deadline:
            time.sleep(0.05)
        self.kill()

    def kill(self) -> None:
        """Kill all of the group at once, as the kernel does when memory runs out.

        Raises:
            RuntimeError: It has not ended a minute later.
        """
        deadline = time.monotonic() + 60.0
        # A killed process keeps its connections until it has given back its memory. On the one core
        # that it was bound to, beside a server that polls, it never got so far (Linux 6.18).
        for pid in self._members():
            with suppress(OSError):
                os.sched_setaffinity(pid, os.sched_getaffinity(0))
        self._signal(signal.SIGKILL)
        while self._lives():
            if time.monotonic() > deadline:
                raise RuntimeError(f"killed a minute ago and still there: {self._members()}")
            time.sleep(0.05)
        self._leader.wait()
        if self._leader.stdin is not None:
            self._leader.stdin.close()

    def freeze(self) -> None:
        """Stop all of the group where it is: a host that hangs, with its connections open."""
        self._signal(signal.SIGSTOP)

    @contextmanager
    def stopped(self, which: str = "") -> Iterator[None]:
        """Stop the program's processes for a while, as a debugger or a full machine does.

        Args:
            which: Only those whose command line begins so; vLLM names its processes there.

        Raises:
            HarnessError: There are none.
        """
        # The shell goes on, so that the end of this object is still the end of the group.
        commands = {pid: _command_line(pid) for pid in self._members()}
        pids = [
            pid
            for pid, words in commands.items()
            if words.startswith(which) and not words.startswith("/bin/sh ")
        ]
        if not pids:
            raise HarnessError(f"of {commands} none begins with {which!r}", "one or more")
        try:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            yield
        finally:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def _members(self) -> list[int]:
        """Return the ids of the group's processes, from Linux's process table."""
        members = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended in the meantime
                # The name, in brackets, may hold anything; group is the third field after it.
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                if int(fields[2]) == self._leader.pid:
                    members.append(int(folder.name))
        return members

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._leader.pid, number)

    def _lives(self) -> bool:
        self._leader.poll()
        try:
            os.killpg(self._leader.pid, 0)
        except ProcessLookupError:
            return False
        return True


def _command_line(pid: int) -> str:
    """Return what started a process, or what it calls itself; nothing where it has ended."""
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        return words.replace("\0", " ").strip()
    return ""

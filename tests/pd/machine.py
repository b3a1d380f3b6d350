"""What a server needs of the machine: cores of its own, free ports, an end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from contextlib import ExitStack, suppress

_FROZEN_S = 5.0


def cores(first: int, count: int = 1) -> str:
    """Return real cores for the threads of `count` workers, as vLLM's CPU binding reads them.

    Args:
        first: Which server this is, counted from 0: servers get other cores while there are any.
        count: Its workers on this machine.
    """
    own = sorted(os.sched_getaffinity(0))
    return "|".join(str(own[(first + n) % len(own)]) for n in range(count))


def free_ports(count: int) -> list[int]:
    """Return `count` different ports of the loopback interface that nobody listens on."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def end_group(leader: subprocess.Popen[bytes], patience: float) -> None:
    """End every process of the group that `leader` started, politely first.

    Args:
        leader: The first process of its own session.
        patience: Seconds to end by themselves.
    """
    deadline = time.monotonic() + patience
    _signal(leader, signal.SIGCONT)
    _signal(leader, signal.SIGTERM)
    while _lives(leader) and time.monotonic() < deadline:
        time.sleep(0.05)
    kill_group(leader)


def kill_group(leader: subprocess.Popen[bytes]) -> None:
    """Kill every process of the group at once, as the kernel does when memory runs out."""
    deadline = time.monotonic() + _FROZEN_S
    _signal(leader, signal.SIGKILL)
    while _lives(leader) and time.monotonic() < deadline:
        time.sleep(0.05)
    leader.wait()


def freeze_group(leader: subprocess.Popen[bytes]) -> None:
    """Stop every process of the group where it is: the host hangs, its connections stay up."""
    _signal(leader, signal.SIGSTOP)


def _signal(leader: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader.pid, number)


def _lives(leader: subprocess.Popen[bytes]) -> bool:
    leader.poll()
    try:
        os.killpg(leader.pid, 0)
    except ProcessLookupError:
        return False
    return True

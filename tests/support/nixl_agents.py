"""Real NIXL agents under the workers of this process: UCX over loopback, caches in DRAM.

`make_worker(nixl=REAL)` builds a worker whose registrations, handshakes, reads and notifications
are NIXL's own. What a test then sees in the caches is what the agents moved.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any
from unittest import mock

# Before UCX is loaded. Other transports would look for devices that a test machine lacks.
os.environ |= {"UCX_NET_DEVICES": "lo", "UCX_TLS": "tcp,self,sm"}

from nixl import _api

from tests.support.nixl_release import NixlConnectorWorker
from tests.support.nixl_worker import step

_PROGRESS_DELAY_US = 1000


class _AgentConfig(_api.nixlBind.nixlAgentConfig):
    """NIXL's, with a progress thread that sleeps: its Python API fixes the delay at 0, with which
    every agent spins on a core of its own."""

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, _PROGRESS_DELAY_US if name == "pthrDelay" else value)


def _agent(name: str, config: object) -> object:
    with mock.patch.object(_api.nixlBind, "nixlAgentConfig", _AgentConfig):
        return _api.nixl_agent(name, config)


REAL: Mapping[str, Any] = {"NixlWrapper": _agent, "nixl_agent_config": _api.nixl_agent_config}
"""For `make_worker` and `surroundings`."""


def await_finished(worker: NixlConnectorWorker, timeout: float = 10.0) -> tuple[set[str], set[str]]:
    """Step until something is reported: requests done sending, requests done receiving.

    Raises:
        TimeoutError: nothing was within `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        sent, received = step(worker)
        if sent or received:
            return sent, received
        time.sleep(0.001)
    raise TimeoutError(f"the worker reported nothing for {timeout} s")

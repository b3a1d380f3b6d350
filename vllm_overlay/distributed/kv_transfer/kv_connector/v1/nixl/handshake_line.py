# SPDX-License-Identifier: Apache-2.0
"""All releases: how long handshakes wait for each other, where the operator bounds it.

One thread shakes all hands of a worker, and a rank that does not answer takes it 5 s. A client can
name as many ranks and peers as it likes, and everybody's first read from a peer waits in line
behind them, with its blocks. In `--kv-transfer-config`::

    "kv_connector_extra_config": {"max_handshake_wait": 20}

A handshake that comes up when the line has not been empty for so many seconds fails without being
made, and so does one that has itself taken so long when its next rank has answered. Both are failed
handshakes like any other, so `kv_load_failure_policy` decides. The line is then empty in no time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from vllm.config import KVTransferConfig

_OPTION = "max_handshake_wait"

_Result = TypeVar("_Result")

_Worker = Any
"""`NixlConnectorWorker`; from 0.24.0 on what those that pull and those that push are made of."""


def max_handshake_wait(config: KVTransferConfig) -> float:
    """Return the seconds that a handshake may wait for others; infinite if nothing is configured.

    Raises:
        ValueError: The option is no number of seconds.
    """
    seconds: Any = config.get_from_extra_config(_OPTION, None)
    if seconds is None:
        return float("inf")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise ValueError(
            f"kv_connector_extra_config.{_OPTION} is {seconds!r}. Expected a number of seconds "
            "greater than 0"
        )
    return seconds


class HandshakeLine:
    """The handshakes that a worker's thread makes, one after the other. Only for that thread."""

    def __init__(self, worker: _Worker) -> None:
        self._worker = worker
        # Of a worker that was made without one, as tests do, nothing is asked.
        config = getattr(getattr(worker, "vllm_config", None), "kv_transfer_config", None)
        self._limit = float("inf")
        if isinstance(config, KVTransferConfig):
            self._limit = max_handshake_wait(config)
        self._since: float | None = None  # the line is not empty
        self._began = float("inf")

    def make(self, handshake: Callable[[], _Result]) -> _Result:
        """Make a handshake whose turn it is.

        Raises:
            TimeoutError: It came up too late, or took too long.
        """
        self._began = time.monotonic()
        if self._since is None:
            self._since = self._began
        try:
            if self._began - self._since > self._limit:
                raise TimeoutError(
                    f"handshakes with other engines have taken more than {self._limit:g} s "
                    f"({_OPTION}), and this one has not been made"
                )
            return handshake()
        finally:
            self._began = float("inf")
            with self._worker._handshake_lock:
                if len(self._worker._handshake_futures) <= 1:  # this one
                    self._since = None

    def rank_answered(self) -> None:
        """Hear that a rank of the peer has answered.

        Raises:
            TimeoutError: The handshake has taken too long.
        """
        if time.monotonic() - self._began > self._limit:
            raise TimeoutError(f"not all ranks have answered within {self._limit:g} s ({_OPTION})")


def line_of(worker: _Worker) -> HandshakeLine:
    """Return a worker's line."""
    # Made on demand: a test may make a worker without its constructor.
    known = worker.__dict__
    if "_handshake_line" not in known:
        known["_handshake_line"] = HandshakeLine(worker)
    line: HandshakeLine = known["_handshake_line"]
    return line

# SPDX-License-Identifier: Apache-2.0
"""Up to 0.23.0: D forgets an engine that it has not read from for an hour.

D shakes hands with an engine once, and keeps of it NIXL agents, descriptor lists in the size of its
cache, and tables: also when that P has been restarted under another id, or is gone. As upstream
does from 0.24.0 on, they go before D meets another engine, which is when they would become more.
`kv_connector_extra_config.engine_ttl` has the name, the default and the meaning that it has there.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.handshake import disconnect
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.renewal import engines_of, unused

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata

logger = init_logger(f"vllm.{__name__}")

DEFAULT_TTL = 3600.0
"""Seconds; what upstream's 0.24.0 takes."""

_Worker = Any
"""`NixlConnectorWorker`."""

_Start = Callable[[_Worker, "NixlConnectorMetadata"], None]


def forgets_idle_engines(start: _Start) -> _Start:
    """Have `start_load_kv` forget engines that have not been read from, before it meets another."""

    @functools.wraps(start)
    def wrapper(self: _Worker, metadata: NixlConnectorMetadata) -> None:
        asked = engines_of(metadata.reqs_to_recv.values())
        # From 0.22.0 on heartbeats meet it first, for requests that wait.
        asked |= getattr(metadata, "heartbeat_by_engine", {}).keys()
        if asked:
            _forget_idle(self, asked)
        start(self, metadata)

    return wrapper


def _forget_idle(worker: _Worker, asked: set[str]) -> None:
    now = time.perf_counter()
    with worker._handshake_lock:
        connected = set(worker._remote_agents)
    # As 0.24.0 names it. Made on demand: a test may make a worker without its constructor.
    before: dict[str, float] = worker.__dict__.get("_engine_last_active", {})
    last = {one: now if one in asked else before.get(one, now) for one in connected | asked}
    worker._engine_last_active = dict(last)
    if not connected or asked <= connected:
        return
    ttl = _ttl(worker)
    idle = {one for one in connected if 0 < ttl < now - last[one]} - {worker.engine_id}
    for engine_id in unused(worker, idle):
        disconnect(worker, engine_id)
        logger.info(
            "Forgot engine %s, which nothing was read from for %.0f s. The next request "
            "from it begins with a handshake.",
            engine_id,
            now - last[engine_id],
        )


def _ttl(worker: _Worker) -> float:
    """Return the seconds that the operator gave; the default where those are no number."""
    config = worker.vllm_config.kv_transfer_config
    ttl: object = config.get_from_extra_config("engine_ttl", DEFAULT_TTL)
    return ttl if isinstance(ttl, int | float) else DEFAULT_TTL

# SPDX-License-Identifier: Apache-2.0
"""All releases: a handshake leaves a connected engine behind, or nothing.

D enters what each rank of a peer says about itself below the peer's engine id, and checks it after
that. If the handshake then fails, at this rank or at a later one, what was entered would be held
against the peer when it comes back under its id, restarted with other settings: the tables keep
what they were told first.

What a thread has not entered it does not undo: only vLLM's handshake thread enters, and with K12
another one talks to peers as well.

NIXL keeps the agents of such a peer, as on stock. It is asked for by each of its requests, and to
load an agent again costs nothing; but of each that NIXL lets go, a connection stays open, at either
end and for good (NIXL 1.5.1 over UCX).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.logger import init_logger

from vllm_overlay.logging_utils.bounded_log import BoundedLog
from vllm_overlay.plugins import is_plugins

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlAgentMetadata

log = BoundedLog(init_logger(f"vllm.{__name__}"))

_Result = TypeVar("_Result")

_Worker = Any
"""`NixlConnectorWorker`; from 0.24.0 on what those that pull and those that push are made of."""

_OF_ENGINES = (
    "kv_caches_base_addr",
    "dst_num_blocks",
    "_physical_blocks_per_logical",  # 0.20.x
    "tp_mappings",  # from 0.21.0 on
    "draft_tp_mappings",  # from 0.33.0 on
    "dst_region_num_blocks",  # from 0.30.0 on, as all below
    "dst_region_group_ids",
    "dst_region_mem_types",
    "dst_uses_region_group_mapping",
)
"""The worker's tables by engine id, as far as a release has them."""

_OF_CONNECTED = (
    "_tp_size",  # up to 0.19.1, as the next; the topology shares them
    "_block_size",
    "_engine_last_active",  # from 0.24.0 on
    "_engine_clock_offset",  # from 0.26.0 on
)
"""Those that are entered with an engine, or checked by a handshake that is not ours to undo."""

_OF_CUTS = "src_xfer_handles_by_tp_ratio", "_dram_src_handles_by_tp_ratio"
"""The lists of our own memory by the cut; the second from 0.30.0 on."""

_OF_TOPOLOGY = ("_engines", "_fa_source_sets", "_fa_source_indices")
"""The topology's, up to 0.23.0. There an engine's key says its pipeline stage too, which for NIXL
is always the first."""


def load_agent(worker: _Worker, peer: NixlAgentMetadata) -> str:
    """Load the NIXL agent of a peer's rank; this thread enters its engine from now on."""
    agent: str = worker.nixl_wrapper.add_remote_agent(peer.agent_metadata)
    _entered(worker).add(peer.engine_id)
    return agent


def _entered(worker: _Worker) -> set[str]:
    """Engines of which this thread has entered ranks, in handshakes that are under way."""
    # Made on demand: a test may make a worker without its constructor.
    here = worker.__dict__.setdefault("_engines_in_handshake", threading.local())
    engines: set[str] = here.__dict__.setdefault("engines", set())
    return engines


def forgets_whom_it_refuses(add: Callable[..., _Result]) -> Callable[..., _Result]:
    """Have `add_remote_agent` forget the whole engine when it does not take one of its ranks.

    And lists of our own memory, cut for as many ranks as the peer has, that this would have been
    the first to use: NIXL may have made some of them only, and nobody makes the others.
    """

    @functools.wraps(add)
    def wrapper(
        self: _Worker,
        nixl_agent_meta: NixlAgentMetadata,
        *rank_and_sizes: int,
        **named: int,
    ) -> _Result:
        cuts = [vars(self).get(table, {}) for table in _OF_CUTS]
        known = [set(lists) for lists in cuts]
        try:
            return add(self, nixl_agent_meta, *rank_and_sizes, **named)
        except Exception:
            forget(self, nixl_agent_meta.engine_id)
            for lists, before in zip(cuts, known, strict=True):
                for cut in lists.keys() - before:
                    for handle in filter(None, lists.pop(cut)):
                        _give_back(self.nixl_wrapper.release_dlist_handle, handle)
            raise

    return wrapper


def forgets_whom_it_loses(handshake: Callable[..., _Result]) -> Callable[..., _Result]:
    """Have `_nixl_handshake` forget an engine that it could not talk to all ranks of."""

    @functools.wraps(handshake)
    def wrapper(
        self: _Worker,
        host: str,
        port: int,
        remote_tp_size: int,
        expected_engine_id: str,
        *sizes: int,
        **named: Any,  # noqa: ANN401 - whatever the release hands on
    ) -> _Result:
        try:
            result = handshake(
                self, host, port, remote_tp_size, expected_engine_id, *sizes, **named
            )
        except Exception:
            if expected_engine_id in _entered(self):
                forget(self, expected_engine_id)
            raise
        _entered(self).discard(expected_engine_id)
        return result

    return wrapper


def forget(worker: _Worker, engine_id: str) -> None:
    """Undo what a handshake that failed has entered; the peer's agents stay.

    Not of an engine that is connected, nor of our own, whatever a peer calls itself.
    """
    if engine_id == worker.engine_id or engine_id in worker._remote_agents:
        return
    _entered(worker).discard(engine_id)
    _undo(worker, engine_id)


def disconnect(worker: _Worker, engine_id: str) -> None:
    """Undo what a handshake that succeeded has entered. The engine is not our own.

    NIXL must have nothing under way with it, nor be loading agents in another thread.
    """
    cleanup: Any = getattr(worker, "_cleanup_remote_engine", None)  # from 0.24.0 on
    with worker._handshake_lock:
        if is_plugins(cleanup):  # it may have tables of its own
            _give_back(functools.partial(cleanup, log_eviction=False), engine_id)
        agents = worker._remote_agents.pop(engine_id, {})
        addresses = vars(worker).get("_engine_by_address", {})
        for address in [where for where, who in addresses.items() if who == engine_id]:
            del addresses[address]
    _undo(worker, engine_id)
    for agent in agents.values():
        _give_back(worker.nixl_wrapper.remove_remote_agent, agent)
    for table in _OF_CONNECTED:
        vars(worker).get(table, {}).pop(engine_id, None)


def _undo(worker: _Worker, engine_id: str) -> None:
    tables = worker.__dict__
    for handle in tables.get("dst_xfer_side_handles", {}).pop(engine_id, {}).values():
        _give_back(worker.nixl_wrapper.release_dlist_handle, handle)
    for table in _OF_ENGINES:
        tables.get(table, {}).pop(engine_id, None)
    topology: Any = getattr(worker, "transfer_topo", None)
    if hasattr(topology, "unregister_remote_engine"):
        topology.unregister_remote_engine(engine_id)
        return
    for table in _OF_TOPOLOGY:
        for key in (engine_id, (engine_id, 0)):
            getattr(topology, table, {}).pop(key, None)


def _give_back(release: Callable[[Any], None], what: object) -> None:
    try:
        release(what)
    except Exception:
        log.warning("NIXL keeps %s of a peer that is no longer connected.", what, exc_info=True)

"""Of a peer that was refused nothing stays; stock keeps what it was told first."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from tests.support.nixl_agents import REAL
from tests.support.nixl_release import NixlAgentMetadata, NixlConnectorWorker
from tests.support.nixl_worker import (
    agent_name,
    await_handshakes,
    connect,
    lives,
    make_worker,
    nixl_of,
    peer_metadata,
    raising,
    rank_key,
    receive,
    register_peer,
    script_handshake,
    step,
    topology_of,
)
from tests.support.release import since
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.handshake import (
    disconnect,
    forget,
    forgets_whom_it_loses,
    load_agent,
)

if not since("0.20.0"):
    pytest.skip("42097 and what stands on it: from 0.20.0 on", allow_module_level=True)

GROUPS = [("full",), ("full", "mamba")]


def decoder(groups: Any = ("full",), **config: Any) -> NixlConnectorWorker:  # noqa: ANN401
    """Two kernel blocks in a logical block."""
    return make_worker(groups=groups, block_size=8, kernel_block_size=4, **config)


OTHERS = (
    "_engines_in_handshake",
    "_engine_last_active",  # of those asked for too, until others are
    "_handshake_reports",
    "src_xfer_handles_by_tp_ratio",
)
"""Tables that are of our own memory, or by kind of failure, or say when a read was asked for."""


def kept(worker: NixlConnectorWorker) -> dict[str, Any]:
    """What there is by engine, and for which."""
    return {
        f"{type(owner).__name__}.{name}": set(value)
        for owner in (worker, topology_of(worker))
        for name, value in vars(owner).items()
        if isinstance(value, dict) and value and name not in OTHERS
    }


def loaded(worker: NixlConnectorWorker) -> list[str]:
    """The agents that NIXL has, in the order in which they came."""
    nixl = nixl_of(worker)
    agents = [metadata.decode() for (metadata,) in nixl.called("add_remote_agent")]
    for (agent,) in nixl.called("remove_remote_agent"):
        agents.remove(agent)
    return agents


@pytest.mark.parametrize("groups", GROUPS, ids=["plain", "hybrid"])
def test_a_peer_that_does_as_the_refusal_says_is_accepted(groups: Any) -> None:  # noqa: ANN401
    worker = decoder(groups)
    before = kept(worker)
    for _ in range(3):
        with pytest.raises(RuntimeError, match=r"kernel blocks|physical_blocks"):
            connect(worker, "P", physical_blocks_per_logical_kv_block=4)
        assert kept(worker) == before
    connect(worker, "P")
    # Each that NIXL lets go leaves a connection open, at either end.
    assert nixl_of(worker).called("remove_remote_agent") == []
    local, remote = [[1, 2], [3]], [[5, 6], [7]]
    receive(worker, local_blocks=local[: len(groups)], remote_blocks=remote[: len(groups)])
    nixl_of(worker).finish(*nixl_of(worker).reads)
    assert step(worker)[1] == {"req-d"}
    assert worker.get_block_ids_with_load_errors() == set()


@pytest.mark.parametrize("refused_rank", [0, 1])
def test_all_ranks_of_a_refused_peer_are_forgotten(refused_rank: int) -> None:
    worker = decoder()
    before = kept(worker)
    ratios = [4, 4]

    def handshake(engine_id: str, tp_size: int) -> dict[Any, str]:
        agents: dict[Any, str] = {}
        for rank in range(tp_size):
            metadata = peer_metadata(
                worker, engine_id, rank, tp_size,
                physical_blocks_per_logical_kv_block=ratios[rank],
            )  # fmt: skip
            agents |= {rank_key(rank): worker.add_remote_agent(metadata, rank, tp_size)}
        return agents

    ratios[1 - refused_rank] = 2
    script_handshake(worker, handshake)
    receive(worker, "a", tp_size=2)
    await_handshakes(worker)
    assert lives(step, worker)[1] == {"a"}
    worker.get_block_ids_with_load_errors()
    assert nixl_of(worker).called("remove_remote_agent") == []
    sides = {args[0] for args in nixl_of(worker).called("release_dlist_handle")}
    assert len(sides) == refused_rank  # the descriptors of rank 0, where it had some
    after = kept(worker)
    assert after == before

    script_handshake(worker, lambda engine, tp_size: register_peer(worker, engine, tp_size))
    receive(worker, "b", tp_size=2)
    await_handshakes(worker)
    step(worker)
    nixl_of(worker).finish(*nixl_of(worker).in_flight())
    assert step(worker)[1] == {"b"}
    assert worker.get_block_ids_with_load_errors() == set()


@pytest.mark.skipif(not since("0.33.0"), reason="up to 0.32.0 a draft model has no mapping")
def test_how_a_draft_model_reads_of_a_refused_peer_is_forgotten() -> None:
    """Its heads are shared out over the ranks; those of the model it drafts for are not."""
    worker: Any = decoder()
    worker._head_sharded_draft_regions, worker._head_sharded_draft_kv_heads = frozenset({0}), 2
    before = kept(worker)
    with pytest.raises(RuntimeError, match="kernel blocks"):
        connect(worker, "P", physical_blocks_per_logical_kv_block=4)
    assert kept(worker) == before
    connect(worker, "P")
    assert worker.draft_tp_mappings.keys() == {"P"}


@pytest.mark.parametrize("made", [0, 1, 2])
def test_lists_of_our_memory_that_were_not_all_made_are_made_anew(made: int) -> None:
    """Stock keeps those that there are, and reads by one that there is not end its engine."""
    worker = decoder()
    nixl = nixl_of(worker)
    before = len(nixl.called("prep_xfer_dlist"))
    fails = raising(OSError("busy"), lambda *_: len(nixl.called("prep_xfer_dlist")) > before + made)
    nixl.on["prep_xfer_dlist"] = fails
    with pytest.raises(OSError, match="busy"):
        connect(worker, "P", tp_size=2)
    assert not worker.src_xfer_handles_by_tp_ratio
    assert len(nixl.called("release_dlist_handle")) == made
    nixl.on.clear()
    connect(worker, "P", tp_size=2)
    receive(worker, "d", tp_size=2)
    assert len(nixl.in_flight()) == 2
    assert nixl.misuse == []


def test_a_refusal_that_nixl_cannot_clean_up_after_is_a_refusal() -> None:
    worker = decoder()
    nixl_of(worker).on["release_dlist_handle"] = raising(OSError("busy"))
    before = kept(worker)
    metadata = peer_metadata(worker, "P", 0, 2)
    worker.add_remote_agent(metadata, 0, 2)
    with pytest.raises(RuntimeError, match="kernel blocks"):
        connect(worker, "P", tp_size=2, physical_blocks_per_logical_kv_block=4)
    assert kept(worker) == before
    del nixl_of(worker).on["release_dlist_handle"]


def test_a_peer_that_is_refused_again_and_again_leaves_no_connection_open() -> None:
    worker, peer = decoder(nixl=REAL), decoder(nixl=REAL, engine_id="P")
    said = peer.xfer_handshake_metadata
    assert said is not None
    of_peer = msgspec.msgpack.decode(said.agent_metadata_bytes, type=NixlAgentMetadata)
    of_peer.physical_blocks_per_logical_kv_block = 4
    open_files = []
    for _ in range(20):
        with pytest.raises(RuntimeError, match="kernel blocks"):
            worker.add_remote_agent(of_peer)
        open_files.append(len([*Path("/proc/self/fd").iterdir()]))
    # Some open late; those that a refusal left were ten each.
    assert open_files[-1] - open_files[0] < len(open_files)


def test_a_peer_that_calls_itself_as_we_do_does_not_take_our_tables() -> None:
    worker = decoder()
    before = kept(worker)
    with pytest.raises(AssertionError):
        worker.add_remote_agent(peer_metadata(worker, worker.engine_id))
    assert kept(worker) == before


def test_an_engine_that_is_connected_stays_so_whatever_it_says_later() -> None:
    worker = decoder()
    connect(worker, "P")
    before = kept(worker)
    again = peer_metadata(worker, "P", physical_blocks_per_logical_kv_block=4)
    assert worker.add_remote_agent(again) == agent_name("P", 0)
    forget(worker, "P")
    assert kept(worker) == before


def test_of_an_engine_that_is_let_go_nothing_stays_and_of_others_all() -> None:
    worker = decoder()
    connect(worker, "Q")
    vars(worker)["_engine_by_address"] = {1: "Q"}  # from 0.31.0 on
    before = kept(worker)
    connect(worker, "P")
    vars(worker)["_engine_by_address"] = {1: "Q", 2: "P"}
    disconnect(worker, "P")
    assert kept(worker) == before
    assert "P" not in vars(worker).get("_engine_last_active", {})
    assert loaded(worker) == [agent_name("Q", 0)]


@pytest.mark.parametrize("refuses", ["release_dlist_handle", "remove_remote_agent"])
def test_nixl_is_asked_for_all_of_an_engine_whatever_it_refuses(refuses: str) -> None:
    """What vLLM does when it lets go of one ends at the first that NIXL refuses."""
    worker = decoder()
    before = kept(worker)
    connect(worker, "P", tp_size=2)
    nixl = nixl_of(worker)
    nixl.on[refuses] = raising(OSError("busy"))
    disconnect(worker, "P")
    assert kept(worker) == before
    assert nixl.called("remove_remote_agent") == [(agent_name("P", rank),) for rank in (0, 1)]
    assert len(nixl.called("release_dlist_handle")) == 2
    nixl.on.clear()


@pytest.mark.parametrize("fails", [False, True])
def test_a_plugin_lets_go_of_what_it_has_of_an_engine(fails: bool) -> None:
    """First, and by its own method, which may call vLLM's, and may fail."""
    worker, let_go = decoder(), []
    connect(worker, "Q")
    before = kept(worker)
    connect(worker, "P")

    def cleanup(engine_id: str, *, log_eviction: bool = True) -> None:
        let_go.append((engine_id, log_eviction, engine_id in worker._remote_agents))
        if fails:
            raise RuntimeError("NIXL keeps a list")
        vllms = getattr(type(worker), "_cleanup_remote_engine", None)
        if vllms is not None:
            vllms(worker, engine_id, log_eviction=log_eviction)

    vars(worker)["_cleanup_remote_engine"] = cleanup
    disconnect(worker, "P")
    del vars(worker)["_cleanup_remote_engine"]
    assert let_go == [("P", False, True)]
    assert kept(worker) == before
    assert loaded(worker) == [agent_name("Q", 0)]


@pytest.mark.parametrize("outcomes", [["lost"], ["made", "lost"], ["lost", "lost"]])
def test_a_thread_forgets_nothing_that_another_has_entered(outcomes: list[str]) -> None:
    worker, left = decoder(), [*outcomes]
    peer = peer_metadata(worker, "P", 0, 2)

    @forgets_whom_it_loses
    def handshake(*_: object) -> None:
        if len(left) > 1:
            load_agent(worker, peer)
        if left.pop(0) == "lost":
            raise ConnectionError("lost")

    with ThreadPoolExecutor(1) as this:
        for _ in outcomes[1:]:
            this.submit(handshake, worker, "p", 1, 2, "P").exception(10)
        worker.add_remote_agent(peer, 0, 2)
        before = kept(worker)
        assert this.submit(handshake, worker, "p", 1, 2, "P").exception(10)
    assert kept(worker) == before


# ---------------------------------------------------------------- over a socket


@pytest.fixture
def serve(worker: NixlConnectorWorker) -> Iterator[Callable[[list[bytes]], int]]:
    """Give a list of answers a port."""
    context = zmq.Context()
    sockets = []

    def start(answers: list[bytes]) -> int:
        socket = context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, 10_000)
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        sockets.append(socket)

        def answer() -> None:
            for body in answers:
                who, empty, _ = socket.recv_multipart()
                clock = msgspec.msgpack.encode(0.0)
                parts = [body, clock] if hasattr(worker, "_engine_clock_offset") else [body]
                socket.send_multipart([who, empty, *parts])

        threading.Thread(target=answer, daemon=True).start()
        return int(port)

    yield start
    context.destroy(linger=0)


@pytest.fixture
def worker() -> NixlConnectorWorker:
    return decoder()


def said_by(worker: NixlConnectorWorker, rank: int, tp_size: int, **changes: Any) -> bytes:  # noqa: ANN401
    """What a rank of P answers."""
    payload = worker.xfer_handshake_metadata
    assert payload is not None
    metadata = peer_metadata(worker, "P", rank, tp_size, **changes)
    said = msgspec.msgpack.encode(metadata)
    return msgspec.msgpack.encode(dataclasses.replace(payload, agent_metadata_bytes=said))


def test_a_peer_that_is_lost_between_two_ranks_is_forgotten(
    worker: NixlConnectorWorker, serve: Callable[[list[bytes]], int]
) -> None:
    before = kept(worker)
    port = serve([said_by(worker, 0, 2), b"broken"])
    with pytest.raises(RuntimeError, match="decode"):
        worker._nixl_handshake("127.0.0.1", port, 2, "P")
    assert kept(worker) == before
    # It comes back with fewer blocks.
    blocks = worker.num_blocks - 2
    port = serve([said_by(worker, rank, 2, num_blocks=blocks) for rank in range(2)])
    worker._nixl_handshake("127.0.0.1", port, 2, "P")
    assert nixl_of(worker).called("remove_remote_agent") == []


def test_an_engine_that_was_let_go_may_come_back_with_other_settings(
    worker: NixlConnectorWorker, serve: Callable[[list[bytes]], int]
) -> None:
    if not hasattr(worker, "_cleanup_remote_engine"):
        pytest.skip("up to 0.23.0 an engine that is connected is never let go")

    def shake_hands(**changes: Any) -> None:  # noqa: ANN401
        port = serve([said_by(worker, 0, 1, **changes)])
        result: Any = worker._nixl_handshake("127.0.0.1", port, 1, "P")
        # From 0.26.0 on it also says how far P's clock is from ours.
        worker._remote_agents["P"] = result[0] if isinstance(result, tuple) else result
        vars(worker)["_engine_last_active"]["P"] = 0.0

    for blocks in 16, 12:
        shake_hands(num_blocks=blocks)
        worker._cleanup_remote_engine("P")
    with pytest.raises(RuntimeError, match="kernel blocks"):
        shake_hands(physical_blocks_per_logical_kv_block=4)
    shake_hands()
    assert loaded(worker)[-1] == agent_name("P", 0)

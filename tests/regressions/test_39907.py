"""39907: one engine id for all ranks of an engine, over nodes and pipeline stages.

Every node that starts a multi-node engine makes up its own configuration, and in it a random
engine id, while the scheduler on the first node announces the first node's id to the peers.
Here each rank is a process of its own with a configuration of its own, joined to the others by
vLLM's own groups over gloo. What each rank then says about itself in the NIXL handshake is
served by a real scheduler with the first node's id, and a real worker of a peer shakes hands.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import msgspec
import pytest
from vllm import envs
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer import kv_transfer_state

from tests.support.harness import HarnessError
from tests.support.nixl_release import (
    NixlAgentMetadata,
    NixlConnectorScheduler,
    NixlHandshakePayload,
)
from tests.support.nixl_worker import (
    allocate,
    make_kv_cache_config,
    make_vllm_config,
    make_worker,
    rank_key,
    surroundings,
    tiny_model,
)
from tests.support.stand_in_model import HEADS

SECONDS = 90  # until ranks that wait for each other are given up


def run_rank(rank: int, tp: int, pp: int, meeting_point: str) -> tuple[str, NixlHandshakePayload]:
    """What one rank's process does from start-up to registered KV caches.

    Returns:
        The engine id that this rank's configuration came with, and what the rank tells peers.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    config = make_vllm_config()
    config.parallel_config.tensor_parallel_size = tp
    config.parallel_config.pipeline_parallel_size = pp
    own_id = config.kv_transfer_config.engine_id
    kv_cache = make_kv_cache_config(heads=HEADS // tp)
    with set_current_vllm_config(config), surroundings():
        parallel_state.init_distributed_environment(
            world_size=tp * pp,
            rank=rank,
            distributed_init_method=meeting_point,
            local_rank=rank,
            backend="gloo",
        )
        parallel_state.initialize_model_parallel(tp, pp, backend="gloo")
        kv_transfer_state.ensure_kv_transfer_initialized(config, kv_cache)
        connector: Any = kv_transfer_state.get_kv_transfer_group()
        connector.register_kv_caches(allocate(kv_cache, 16))
    return own_id, connector.get_handshake_metadata()


def _process(pipe: Connection, *args: Any) -> None:  # noqa: ANN401 - run_rank's
    try:
        pipe.send(run_rank(*args))
    except BaseException:
        pipe.send(traceback.format_exc())
    wait([pipe], SECONDS)  # a rank that leaves early takes the others' groups down
    kv_transfer_state.ensure_kv_transfer_shutdown()
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


def run_engine(tp: int, pp: int, folder: Path) -> list[tuple[str, NixlHandshakePayload]]:
    """Run every rank of an engine in a process of its own; results by rank, stage by stage."""
    tiny_model(False)  # made once, here: the model's name counts in the handshake
    # vLLM takes long to import, so the ranks are forked from this process, which has it.
    fork = multiprocessing.get_context("fork")
    ranks: dict[Any, int] = {}
    processes = []
    results: dict[int, tuple[str, NixlHandshakePayload]] = {}
    try:
        for rank in range(tp * pp):
            here, there = fork.Pipe()
            args = (there, rank, tp, pp, f"file://{folder}/meeting-point")
            process = fork.Process(target=_process, args=args, daemon=True)
            process.start()
            ranks[here] = rank
            processes.append(process)
        while len(results) < len(ranks):
            waiting = [pipe for pipe, rank in ranks.items() if rank not in results]
            answered: list[Any] = wait(waiting, SECONDS)
            if not answered:
                silent = [ranks[pipe] for pipe in waiting]
                raise HarnessError(f"ranks {silent} say nothing for {SECONDS} s", "what they are")
            for pipe in answered:
                result = pipe.recv()
                if isinstance(result, str):
                    raise HarnessError(f"rank {ranks[pipe]} ended:\n{result}", "what it is")
                results[ranks[pipe]] = result
        for pipe in ranks:
            pipe.send("leave")
        for process in processes:
            process.join(SECONDS)
    finally:
        for process in processes:
            process.kill()
    return [results[rank] for rank in sorted(results)]


def announced_id(payload: NixlHandshakePayload) -> str:
    """The engine id by which a rank goes in the handshake."""
    decoder = msgspec.msgpack.Decoder(NixlAgentMetadata)
    engine_id: str = decoder.decode(payload.agent_metadata_bytes).engine_id
    return engine_id


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2)])
def test_every_rank_goes_by_the_id_that_the_scheduler_announces(
    tp: int, pp: int, tmp_path: Path
) -> None:
    ranks = run_engine(tp, pp, tmp_path)
    own_ids = [own_id for own_id, _ in ranks]
    if len(set(own_ids)) != tp * pp:
        raise HarnessError(f"the ids {own_ids}", "one for each node, or nothing is shown here")

    assert [announced_id(payload) for _, payload in ranks] == [own_ids[0]] * (tp * pp)

    # The scheduler runs on the first node, under the first node's configuration, and serves
    # what all ranks say about themselves, by tensor rank.
    config = make_vllm_config(engine_id=own_ids[0])
    scheduler = NixlConnectorScheduler(config, own_ids[0], make_kv_cache_config())
    served = {rank_key(index % tp): payload for index, (_, payload) in enumerate(ranks)}
    scheduler.set_xfer_handshake_metadata(served)
    try:
        for rank in range(tp):
            peer = make_worker(engine_id="D", tp_size=tp, tp_rank=rank)
            answer = peer._nixl_handshake(
                "localhost", envs.VLLM_NIXL_SIDE_CHANNEL_PORT, tp, scheduler.engine_id
            )
            agents = answer[0] if isinstance(answer, tuple) else answer
            assert set(agents) == {rank_key(rank)}
    finally:
        scheduler.shutdown()

"""K15: ranks of data parallelism have ids of their own, over all nodes.

Two nodes with two ranks each go by one configuration, in which the operator has set the engine id.
Each rank is started as vLLM starts it, in a process or as an actor of Ray's, up to where its engine
core would be made; a NIXL scheduler says what that configuration offers to peers.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import core, utils
from vllm.v1.request import Request, RequestStatus

from tests.support.nixl_release import NixlConnectorScheduler
from tests.support.nixl_worker import (
    await_handshakes,
    make_kv_cache_config,
    make_vllm_config,
    make_worker,
    nixl_of,
    receive,
    register_peer,
    script_handshake,
    step,
)

RANKS = [(0, 0), (1, 1), (2, 0), (3, 1)]  # among all, and among those of a node


def prefill_config() -> Any:  # noqa: ANN401 - vLLM's
    config = make_vllm_config(engine_id="prefill")
    config.parallel_config.data_parallel_size = 4
    config.parallel_config.data_parallel_size_local = 2
    return config


def offered_id(config: Any) -> str:  # noqa: ANN401
    """The engine id by which a router hands the blocks of a finished prefill to D."""
    engine_id = config.kv_transfer_config.engine_id
    scheduler: Any = NixlConnectorScheduler(config, engine_id, make_kv_cache_config())
    request = Request("req-p", list(range(32)), SamplingParams(max_tokens=1), None)
    request.kv_transfer_params = {"do_remote_decode": True, "do_remote_prefill": False}
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    _, params = scheduler.request_finished(request, ([1, 2],))
    offered: str = params["remote_engine_id"]
    return offered


class MadeError(SystemExit):
    """An engine core was to be made: the end of what a rank's process does here."""


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], Any]:
    """Starts a rank as its process does; returns the configuration of its engine core."""

    def make(core: Any, *args: Any, vllm_config: Any, **_: Any) -> None:  # noqa: ANN401
        raise MadeError(vllm_config)

    monkeypatch.setattr(core.EngineCoreProc, "__init__", make)
    # What belongs to a process: its name, its output, its signals.
    for name in ("set_process_title", "decorate_logs", "maybe_init_worker_tracer", "signal"):
        monkeypatch.setattr(core, name, mock.Mock())

    def run(dp_rank: int, local_rank: int) -> Any:  # noqa: ANN401
        with pytest.raises(MadeError) as made:
            core.EngineCoreProc.run_engine_core(
                vllm_config=prefill_config(), dp_rank=dp_rank, local_dp_rank=local_rank
            )
        return made.value.code

    return run


def test_ranks_of_two_nodes_have_ids_of_their_own(start: Callable[[int, int], Any]) -> None:
    ids = [offered_id(start(*rank)) for rank in RANKS]
    assert ids == ["prefill_dp0", "prefill_dp1", "prefill_dp2", "prefill_dp3"]


def test_d_reads_from_the_node_that_has_the_blocks(start: Callable[[int, int], Any]) -> None:
    worker = make_worker()
    for node, rank in (("first node", (0, 0)), ("second node", (2, 0))):

        def shake_hands(engine_id: str, tp_size: int, node: str = node) -> dict[Any, str]:
            return register_peer(worker, engine_id, tp_size, agent_metadata=node.encode())

        script_handshake(worker, shake_hands)
        receive(worker, f"from the {node}", engine_id=offered_id(start(*rank)))
        await_handshakes(worker)
        step(worker)
    assert [read.agent for read in nixl_of(worker).reads] == ["first node", "second node"]


@pytest.fixture
def actors(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The configurations with which actors are made, by a Ray that makes none."""
    made: list[Any] = []
    ray = mock.MagicMock()
    actor = ray.remote.return_value.options.return_value

    def make(**kwargs: Any) -> mock.Mock:  # noqa: ANN401 - whatever an actor takes
        made.append(kwargs["vllm_config"])
        return mock.Mock()

    actor.remote.side_effect = make
    monkeypatch.setitem(sys.modules, "ray", ray)
    for name in ("runtime_env", "util", "util.scheduling_strategies"):
        monkeypatch.setitem(sys.modules, f"ray.{name}", mock.MagicMock())
    return made


def groups(count: int) -> list[Any]:
    return [SimpleNamespace(bundle_specs=[]) for _ in range(count)]


def test_actors_of_two_nodes_have_ids_of_their_own(actors: list[Any]) -> None:
    utils.CoreEngineActorManager(
        prefill_config(), mock.Mock(), mock.Mock(), False, groups(4), [0, 1, 0, 1]
    )
    ids = [offered_id(config) for config in actors]
    assert ids == ["prefill_dp0", "prefill_dp1", "prefill_dp2", "prefill_dp3"]


def test_actors_that_come_later_have_ids_of_their_own(
    actors: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = prefill_config()
    config.parallel_config.data_parallel_size = 2
    manager = utils.CoreEngineActorManager(
        config, mock.Mock(), mock.Mock(), False, groups(2), [0, 1]
    )
    monkeypatch.setattr(manager, "add_dp_placement_groups", lambda *_: (groups(2), [0, 1]))
    later = len(inspect.signature(manager.scale_up_elastic_ep).parameters) - 2
    manager.scale_up_elastic_ep(config, 4, *[0] * later)  # redundant experts: none
    ids = [offered_id(config) for config in actors]
    assert ids == ["prefill_dp0", "prefill_dp1", "prefill_dp2", "prefill_dp3"]

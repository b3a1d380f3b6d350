"""Engine cores as actors of Ray's, over nodes that a test makes up.

vLLM's own manager starts them, by a Ray that makes none and keeps what it is given. A test says on
which node an actor runs; there it has that node's environment below what Ray was given for it, and
is vLLM's own up to where its engine core would be made. Of a cluster there is nothing else here.

    with actors(config, {HOST: "10.0.0.1"}) as made, made[1].on(Node("10.0.0.2")) as config:
        host, port = announced(nixl_part(config))
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import core, utils
from vllm.v1.request import Request, RequestStatus

from tests.support.harness import building
from tests.support.nixl_release import NixlConnectorScheduler
from tests.support.nixl_worker import make_kv_cache_config

HOST = "VLLM_NIXL_SIDE_CHANNEL_HOST"

ELSEWHERE = ("240.0.0.1", "240.0.0.2", "240.0.0.3")
"""Addresses of other nodes. They are reserved (RFC 1112), and no machine has one."""


@dataclasses.dataclass(frozen=True)
class Node:
    """A node of the cluster.

    Attributes:
        address: by which it goes in the cluster.
        environment: what was set where Ray was started on it.
    """

    address: str
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Actor:
    """What Ray was given to make an actor of: its class, its environment, and its arguments."""

    kind: type[Any]
    environment: Mapping[str, str]
    arguments: Mapping[str, Any]

    @contextlib.contextmanager
    def on(self, node: Node) -> Iterator[Any]:
        """Be in its process on a node; yields the configuration of its engine core."""
        made: list[Any] = []

        def make(core: Any, vllm_config: Any, *_: Any, **__: Any) -> None:  # noqa: ANN401
            made.append(vllm_config)

        own = {name: value for name, value in os.environ.items() if name != HOST}
        environment = own | dict(node.environment) | dict(self.environment)
        with contextlib.ExitStack() as stack:
            enter = stack.enter_context
            enter(mock.patch.dict(os.environ, environment, clear=True))
            enter(mock.patch.object(sys.modules["ray"], "util", _util(node.address)))
            enter(mock.patch.object(core.EngineCoreProc, "__init__", make))
            enter(mock.patch.object(core.DPEngineCoreProc, "__init__", make))
            enter(mock.patch.object(core, "maybe_init_worker_tracer", mock.Mock()))
            with mock.patch.object(self.kind, "_set_visible_devices", mock.Mock()):
                self.kind(**self.arguments)
            yield made[0]


@contextlib.contextmanager
def actors(
    vllm_config: Any,  # noqa: ANN401 - of a release
    environment: Mapping[str, str],
    size: int = 2,
    later: int = 0,
    *,
    moe: bool = False,
) -> Iterator[list[Actor]]:
    """Start a server of so many data-parallel ranks by Ray, and add ranks later.

    Args:
        vllm_config: the server's.
        environment: what is set where the server is started, beside what is set here.
        size: how many ranks there are.
        later: how many Ray adds while the server runs.
        moe: whether their model is a mixture of experts; such actors are of another class.
    """
    made: list[Actor] = []

    def remote(kind: type[Any]) -> Any:  # noqa: ANN401 - what `options` is called of
        def options(*, runtime_env: Mapping[str, Any], **_: object) -> Any:  # noqa: ANN401
            def make(**arguments: Any) -> Any:  # noqa: ANN401 - a handle
                made.append(Actor(kind, runtime_env["env_vars"], arguments))
                return mock.Mock()

            return SimpleNamespace(remote=make)

        return SimpleNamespace(options=options)

    ray: Any = mock.MagicMock(spec=ModuleType)
    vars(ray).update(remote=remote, get=mock.Mock(), is_initialized=lambda: True, util=_util(""))
    runtime_env = SimpleNamespace(RuntimeEnv=lambda env_vars: {"env_vars": dict(env_vars)})
    modules = {
        "ray": ray,
        "ray.runtime_env": runtime_env,
        "ray.util": mock.MagicMock(),
        "ray.util.scheduling_strategies": mock.MagicMock(),
    }
    parallel = vllm_config.parallel_config
    parallel.data_parallel_size = size
    parallel.data_parallel_size_local = 1
    kind = type(vllm_config.model_config)
    with mock.patch.dict(sys.modules, modules), mock.patch.object(kind, "is_moe", moe):
        with mock.patch.dict(os.environ, environment), building("a server by Ray"):
            manager = utils.CoreEngineActorManager(
                vllm_config, mock.Mock(), mock.Mock(), False, _groups(size), [0] * size
            )
        if later:
            with (
                mock.patch.dict(os.environ, environment),
                building("ranks that are added"),
                mock.patch.object(
                    manager, "add_dp_placement_groups", lambda *_: (_groups(later), [0] * later)
                ),
            ):
                rest = len(inspect.signature(manager.scale_up_elastic_ep).parameters) - 2
                manager.scale_up_elastic_ep(vllm_config, size + later, *[0] * rest)
        yield made


@building("NIXL's part of a scheduler")
def nixl_part(vllm_config: Any) -> Any:  # noqa: ANN401 - of a release
    """NIXL's part of the scheduler of an engine that has this configuration."""
    engine_id = vllm_config.kv_transfer_config.engine_id
    return NixlConnectorScheduler(vllm_config, engine_id, make_kv_cache_config())


def announced(part: Any) -> tuple[str, int]:  # noqa: ANN401 - of a release
    """The host and port of P's side channel, as the client of a finished prefill hears them."""
    request = Request("req-p", list(range(32)), SamplingParams(max_tokens=1), None)
    request.kv_transfer_params = {"do_remote_decode": True, "do_remote_prefill": False}
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    _, params = part.request_finished(request, ([1, 2],))
    return params["remote_host"], params["remote_port"]


def _groups(count: int) -> list[Any]:
    return [SimpleNamespace(bundle_specs=[]) for _ in range(count)]


def _util(address: str) -> Any:  # noqa: ANN401 - a module
    util = mock.MagicMock()
    util.get_node_ip_address = lambda: address
    return util

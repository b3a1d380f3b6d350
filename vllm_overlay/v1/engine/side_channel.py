# SPDX-License-Identifier: Apache-2.0
"""Up to 0.21.0: the host of NIXL's side channel in an engine core that is an actor of Ray's.

Ray gives an actor the driver's environment, over what its own node has set. A host that is set for
the driver is mostly an address of the driver's node, and another node cannot listen there.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import zmq
from vllm import envs
from vllm.logger import init_logger
from vllm.utils.network_utils import is_valid_ipv6_address, make_zmq_path

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(f"vllm.{__name__}")

HOST = "VLLM_NIXL_SIDE_CHANNEL_HOST"

OF_DRIVER = "KVFIX_DRIVER_NIXL_SIDE_CHANNEL_HOST"
"""The driver's `HOST`, on its way to an actor."""

_FOREIGN = (errno.EADDRNOTAVAIL, errno.ENODEV)
"""How a listener fails at an address of another node, and at a name that nobody here knows."""


def hand_over_host(env_vars: dict[str, str]) -> None:
    """Let the driver's host come to actors by another name, beside what their node has set.

    Args:
        env_vars: what actors are given of the driver's environment.
    """
    if HOST in env_vars:
        env_vars[OF_DRIVER] = env_vars.pop(HOST)


def take_host(vllm_config: VllmConfig) -> None:
    """Set the host of this actor's side channel: the driver's, if this node can listen there.

    That is what it was on stock. Where the node cannot, no engine with NIXL starts on stock; such
    a one takes what is set on its own node, as vLLM does from 0.22.0 on, or else the node's address
    in Ray's cluster.

    Args:
        vllm_config: of this actor, with its rank among those of all nodes.
    """
    own = os.environ.get(HOST)
    host = os.environ.pop(OF_DRIVER, own)
    if host is None:
        return
    os.environ[HOST] = host
    if not _has_side_channel(vllm_config):
        return
    port = envs.VLLM_NIXL_SIDE_CHANNEL_PORT + vllm_config.parallel_config.data_parallel_index
    if _listening_fails(host, port) not in _FOREIGN:
        return
    import ray  # only where this is an actor

    for other in (own or host, ray.util.get_node_ip_address()):
        if not _listening_fails(other, port):
            os.environ[HOST] = other
            logger.info("NIXL's side channel: %s is not on this node, %s is taken", host, other)
            return


def _has_side_channel(vllm_config: VllmConfig) -> bool:
    """Whether NIXL's is the connector, or one of several."""
    config = vllm_config.kv_transfer_config
    if config is None:
        return False
    return "Nixl" in f"{config.kv_connector} {config.kv_connector_extra_config}"


def _listening_fails(host: str, port: int) -> int:
    """Return the error number with which the side channel could not listen here, or 0."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as listener:
        listener.setsockopt(zmq.IPV6, is_valid_ipv6_address(host))
        try:
            listener.bind(make_zmq_path("tcp", host, port))
        except zmq.ZMQError as error:
            number: int = error.errno
            return number
    return 0

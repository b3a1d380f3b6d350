# SPDX-License-Identifier: Apache-2.0
"""From 0.22.0 on: where the heartbeats for a P go, by which its leases are prolonged.

D's scheduler keeps an address for each P as long as a request of that P waits or is read. On a busy
D one always does, so the address of the first stays. A heartbeat for a P that is not connected
begins with a handshake, which the reads from that P then share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import HeartbeatInfo

_ADDRESS = {"host": "remote_host", "port": "remote_port"}
_SIZES = ("tp_size", "pp_size", "dcp_size")


def go_to(known: HeartbeatInfo, params: dict[str, Any]) -> None:
    """Have an engine's heartbeats go where the request that came last says that it is.

    Args:
        known: of the engine, from the request that came first.
        params: `kv_transfer_params` that name it.
    """
    for name, given in {**_ADDRESS, **{size: size for size in _SIZES}}.items():
        if given in params and hasattr(known, name):
            setattr(known, name, params[given])

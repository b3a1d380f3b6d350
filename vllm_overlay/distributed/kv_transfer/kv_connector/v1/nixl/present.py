# SPDX-License-Identifier: Apache-2.0
"""Up to 0.26.0: whether an engine transfers KV with NIXL."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1


def transfers_with_nixl(connector: KVConnectorBase_V1 | None) -> bool:
    """Whether a scheduler's connector is NIXL's, or has one of NIXL's inside.

    By the name: upstream's connectors import the overlay, and have several files.
    """
    return any(
        kind.__name__.startswith("Nixl")
        for one in (connector, *getattr(connector, "_connectors", ()))
        for kind in type(one).__mro__
    )

# SPDX-License-Identifier: Apache-2.0
"""All releases: whether an engine transfers KV with NIXL."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1


def connectors_in(connector: KVConnectorBase_V1 | None) -> list[Any]:
    """Return a scheduler's connector and those inside, where it is `MultiConnector` or its like."""
    inside = getattr(connector, "_connectors", None)
    return [connector, *(inside if isinstance(inside, list | tuple) else ())]


def transfers_with_nixl(connector: KVConnectorBase_V1 | None) -> bool:
    """Whether a scheduler's connector is NIXL's, or has one of NIXL's inside."""
    kinds = map(type, connectors_in(connector))
    return any(_is_nixls(kind) for kind in kinds)  # type: ignore[arg-type, unused-ignore]


@functools.cache
def _is_nixls(kind: type) -> bool:
    """Say so by the name: upstream's connectors import the overlay, and have several files."""
    return any(one.__name__.startswith("Nixl") for one in kind.__mro__)

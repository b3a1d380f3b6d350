# SPDX-License-Identifier: Apache-2.0
"""All releases: whether an engine transfers KV with NIXL, and who loads a request's."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request


def connectors_in(connector: KVConnectorBase_V1 | None) -> list[Any]:
    """Return a scheduler's connector and those inside, where it is `MultiConnector` or its like."""
    inside = getattr(connector, "_connectors", None)
    return [connector, *(inside if isinstance(inside, list | tuple) else ())]


def transfers_with_nixl(connector: KVConnectorBase_V1 | None) -> bool:
    """Whether a scheduler's connector is NIXL's, or has one of NIXL's inside."""
    kinds = map(type, connectors_in(connector))
    return any(_is_nixls(kind) for kind in kinds)  # type: ignore[arg-type, unused-ignore]


def loader_of(scheduler: Scheduler, request: Request) -> Any:  # noqa: ANN401 - of any kind
    """Return the connector that loads for a request: of several, the one that was chosen."""
    connector: Any = scheduler.connector
    chosen = getattr(connector, "_requests_to_connector", None)
    number = chosen.get(request.request_id) if isinstance(chosen, dict) else None
    return connector if number is None else connector._connectors[number]


@functools.cache
def _is_nixls(kind: type) -> bool:
    """Say so by the name: upstream's connectors import the overlay, and have several files."""
    return any(one.__name__.startswith("Nixl") for one in kind.__mro__)

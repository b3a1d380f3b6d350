# SPDX-License-Identifier: Apache-2.0
"""What a connector made of several connectors passes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.connector import (
    NeedsTick,
    needs_tick,
)

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1


class PassesTickOn(NeedsTick):
    """A base for `MultiConnector`: it asks for a step when one of its connectors does."""

    _connectors: list[KVConnectorBase_V1]

    @property
    def needs_tick(self) -> bool:  # type: ignore[override]
        """Whether any connector asks for another step of an idle engine."""
        return any(needs_tick(connector) for connector in self._connectors)

# SPDX-License-Identifier: Apache-2.0
"""All releases: what a connector made of several connectors passes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.connector import WantsLooks

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1


class PassesLooksOn(WantsLooks):
    """A base for `MultiConnector`: it asks for a step when one of its connectors does."""

    _connectors: list[KVConnectorBase_V1]

    def next_look(self) -> float | None:
        """When (`time.monotonic`) to take the next step; None if there is nothing to look at."""
        looks = [each.next_look() for each in self._connectors if isinstance(each, WantsLooks)]
        return min((look for look in looks if look is not None), default=None)

    def looks(self) -> None:
        """Hear that a step is taken, and so make the next one wait."""
        for each in self._connectors:
            if isinstance(each, WantsLooks):
                each.looks()

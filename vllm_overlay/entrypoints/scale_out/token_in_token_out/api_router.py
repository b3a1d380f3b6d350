# SPDX-License-Identifier: Apache-2.0
"""From 0.29.0 on: the route of /inference/v1/generate."""

from __future__ import annotations

from typing import Any

from vllm_overlay.entrypoints.rejection import KVTransferRoute
from vllm_overlay.entrypoints.serve.disagg.api_router import among_sampling


class TokensRoute(KVTransferRoute):
    """Transfer parameters of the request itself go before those in the sampling parameters."""

    def transfer_params(self, body: dict[str, Any]) -> object:
        """Return what the handler would use of a body as its transfer parameters."""
        own = super().transfer_params(body)
        return own if own is not None else among_sampling(body)

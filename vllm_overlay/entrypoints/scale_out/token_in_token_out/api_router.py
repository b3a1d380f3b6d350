# SPDX-License-Identifier: Apache-2.0
"""From 0.29.0 on: the route of /inference/v1/generate."""

from __future__ import annotations

from typing import Any

from vllm_overlay.entrypoints.rejection import KVTransferRoute
from vllm_overlay.entrypoints.serve.disagg.api_router import TokensRoute as OlderTokensRoute


class TokensRoute(KVTransferRoute):
    """Transfer parameters of the request itself go before those in the sampling parameters."""

    @staticmethod
    def transfer_params(body: dict[str, Any]) -> object:
        """Return what the handler would use of a body as its transfer parameters."""
        own = KVTransferRoute.transfer_params(body)
        return own if own is not None else OlderTokensRoute.transfer_params(body)

# SPDX-License-Identifier: Apache-2.0
"""All releases: where /inference/v1/generate has parameters; up to 0.23.0 its route."""

from __future__ import annotations

from typing import Any

from vllm_overlay.entrypoints.rejection import KVTransferRoute


class TokensRoute(KVTransferRoute):
    """The handler reads transfer parameters from the sampling parameters, and nowhere else."""

    @staticmethod
    def transfer_params(body: dict[str, Any]) -> object:
        """Return what the handler would use of a body as its transfer parameters."""
        sampling = body.get("sampling_params")
        extra = sampling.get("extra_args") if isinstance(sampling, dict) else None
        return extra.get("kv_transfer_params") if isinstance(extra, dict) else None

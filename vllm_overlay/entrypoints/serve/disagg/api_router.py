# SPDX-License-Identifier: Apache-2.0
"""All releases: where /inference/v1/generate has parameters; up to 0.28.0 its route."""

from __future__ import annotations

from typing import Any

from vllm_overlay.entrypoints.rejection import KVTransferRoute

TAKES_OWN = "_kvfix_takes_own_params"
"""True of an endpoint whose requests' own parameters count where the sampling ones are without, see
`own_params`. vLLM's wrappers around the endpoint hand it on."""


def among_sampling(body: dict[str, Any]) -> object:
    """Return the transfer parameters that stand in a body's sampling parameters."""
    sampling = body.get("sampling_params")
    extra = sampling.get("extra_args") if isinstance(sampling, dict) else None
    return extra.get("kv_transfer_params") if isinstance(extra, dict) else None


class TokensRoute(KVTransferRoute):
    """The handler reads the sampling parameters alone.

    An endpoint that takes them may have put the request's own there.
    """

    def transfer_params(self, body: dict[str, Any]) -> object:
        """Return what the handler would use of a body as its transfer parameters."""
        given = among_sampling(body)
        if given is None and getattr(self.endpoint, TAKES_OWN, False):
            return super().transfer_params(body)
        return given

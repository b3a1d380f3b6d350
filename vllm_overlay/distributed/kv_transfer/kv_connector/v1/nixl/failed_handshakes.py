# SPDX-License-Identifier: Apache-2.0
"""All releases: how often a worker says at length that a handshake has failed.

vLLM reports it twice, for the peer and for each request that wanted it, with the error's traceback:
45 lines for a request, and a client can name as many peers that are not there as it likes.
"""

from __future__ import annotations

from typing import Any

from vllm_overlay.logging_utils.bounded_log import Bound

_KINDS = "handshake_setup_failed", "handshake_failed"

_Worker = Any
"""`NixlConnectorWorker`; from 0.24.0 on what those that pull and those that push are made of."""


def is_reported(worker: _Worker, failure_type: str, context: dict[str, Any]) -> bool:
    """Whether `_log_failure` reports a failure: a few failed handshakes, and all others.

    The first report after some were left out says how many, in its `context`.
    """
    if failure_type not in _KINDS:
        return True
    left_out = _bound_of(worker, failure_type).admit()
    if left_out:
        context["left_out_before"] = left_out
    return left_out is not None


def _bound_of(worker: _Worker, kind: str) -> Bound:
    bounds: dict[str, Bound] = worker.__dict__.setdefault(
        "_handshake_reports", {kind: Bound() for kind in _KINDS}
    )
    return bounds[kind]

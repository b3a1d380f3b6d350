"""Which endpoints of the release hand a request's `kv_transfer_params` on to its engine."""

from __future__ import annotations

from tests.support.release import since
from tests.support.serving_app import ENDPOINTS

TAKERS = [
    endpoint
    for endpoint in ENDPOINTS
    if since("0.19.0") or endpoint not in ("/v1/responses", "/v1/messages")
]

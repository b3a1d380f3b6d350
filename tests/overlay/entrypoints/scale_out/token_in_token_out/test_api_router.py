"""Where a token-level request has its transfer parameters, from 0.33.0 on."""

from __future__ import annotations

from typing import Any

import pytest

router = pytest.importorskip(
    "vllm_overlay.entrypoints.scale_out.token_in_token_out.api_router", reason="from 0.33.0 on"
)

THERE: dict[str, Any] = {"kv_transfer_params": {"do_remote_prefill": True}}
ALSO: dict[str, Any] = {"sampling_params": {"extra_args": {"kv_transfer_params": 7}}}


@pytest.mark.parametrize(
    ("body", "params"),
    [
        (THERE, THERE["kv_transfer_params"]),
        (ALSO, 7),
        ({**ALSO, **THERE}, THERE["kv_transfer_params"]),
        ({**ALSO, "kv_transfer_params": None}, 7),
        ({**ALSO, "kv_transfer_params": {}}, {}),
        ({}, None),
    ],
)
def test_the_request_s_own_go_first(body: dict[str, Any], params: object) -> None:
    async def endpoint() -> None: ...

    assert router.TokensRoute("/", endpoint).transfer_params(body) == params

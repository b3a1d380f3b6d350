"""Where a token-level request has its transfer parameters, up to 0.22.1."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_overlay.entrypoints.serve.disagg.api_router import TokensRoute

THERE: dict[str, Any] = {"kv_transfer_params": {"do_remote_prefill": True}}


@pytest.mark.parametrize(
    ("body", "params"),
    [
        ({"sampling_params": {"extra_args": THERE}}, THERE["kv_transfer_params"]),
        (THERE, None),  # the handler ignores them there
        ({**THERE, "sampling_params": {"extra_args": {"kv_transfer_params": 7}}}, 7),
        ({}, None),
        ({"sampling_params": None}, None),
        ({"sampling_params": []}, None),
        ({"sampling_params": {"extra_args": "x"}}, None),
        ({"sampling_params": {"extra_args": {}}}, None),
    ],
)
def test_in_the_sampling_parameters_and_nowhere_else(body: dict[str, Any], params: object) -> None:
    assert TokensRoute.transfer_params(body) == params

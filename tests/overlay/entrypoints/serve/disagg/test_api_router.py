"""Where a token-level request has its transfer parameters, up to 0.28.0."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_overlay.entrypoints.serve.disagg.api_router import TAKES_OWN, TokensRoute

PARAMS = {"do_remote_prefill": True}
THERE: dict[str, Any] = {"kv_transfer_params": PARAMS}


async def ignores() -> None:
    """An endpoint as on stock."""


async def takes() -> None:
    """An endpoint as patched."""


setattr(takes, TAKES_OWN, True)


@pytest.mark.parametrize(
    ("body", "ignored", "taken"),
    [
        ({"sampling_params": {"extra_args": THERE}}, PARAMS, PARAMS),
        (THERE, None, PARAMS),
        ({**THERE, "sampling_params": {"extra_args": {"kv_transfer_params": 7}}}, 7, 7),
        ({**THERE, "sampling_params": {"extra_args": {"kv_transfer_params": {}}}}, {}, {}),
        ({**THERE, "sampling_params": {"extra_args": {"kv_transfer_params": None}}}, None, PARAMS),
        ({}, None, None),
        ({"sampling_params": None}, None, None),
        ({"sampling_params": []}, None, None),
        ({"sampling_params": {"extra_args": "x"}}, None, None),
        ({"sampling_params": {"extra_args": {}}}, None, None),
    ],
)
def test_in_the_sampling_parameters_and_in_the_field_where_that_is_taken(
    body: dict[str, Any], ignored: object, taken: object
) -> None:
    assert TokensRoute("/", ignores).transfer_params(body) == ignored
    assert TokensRoute("/", takes).transfer_params(body) == taken

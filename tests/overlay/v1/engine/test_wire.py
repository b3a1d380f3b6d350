"""Stock and patched builds of one release understand each other's requests (41269).

An API server and an engine core on another node may be of two builds while a fleet is rolled. The
field that says "abort at once" comes last, where a decoder that does not know it stops.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

FIELDS = msgspec.structs.fields(EngineCoreRequest)
OURS = "abort_immediately"

pytest.importorskip("vllm_overlay.v1.request", reason="from 0.21.0 on it is the release's field")


def _stock() -> Any:  # noqa: ANN401 - a struct
    """The release's own class: the same without our field, in the order of the release."""
    fields: list[Any] = [
        (f.name, f.type) if f.required else (f.name, f.type, f.default)
        for f in FIELDS
        if f.name != OURS
    ]
    return msgspec.defstruct(
        "EngineCoreRequest",
        fields,
        array_like=True,
        omit_defaults=True,
        gc=False,
        namespace={"__module__": EngineCoreRequest.__module__},
    )


def _filled(struct: Any, **more: Any) -> Any:  # noqa: ANN401
    """A request with something in the fields around ours."""
    values: dict[str, Any] = dict.fromkeys(n for n in struct.__struct_fields__ if n != OURS)
    values |= {
        "request_id": "r",
        "prompt_token_ids": [1, 2, 3],
        "sampling_params": SamplingParams(max_tokens=3),
        "arrival_time": 1.5,
        "client_index": 2,
        "current_wave": 4,
        "priority": 5,
        "resumable": True,
        "external_req_id": "the client's",
        "reasoning_ended": True,
    }
    return struct(**(values | more))


def test_our_field_is_the_last() -> None:
    assert EngineCoreRequest.__struct_fields__[-1] == OURS


@pytest.mark.parametrize("ours", [False, True])
def test_a_stock_engine_core_takes_our_requests(ours: bool) -> None:
    stock = _stock()
    sent = MsgpackEncoder().encode(_filled(EngineCoreRequest, **{OURS: ours}))
    got = MsgpackDecoder(stock).decode(sent)
    for name in stock.__struct_fields__:
        if name != "sampling_params":
            assert getattr(got, name) == getattr(_filled(stock), name), name
    assert got.sampling_params.max_tokens == 3


def test_our_engine_core_takes_stock_requests() -> None:
    stock = _stock()
    got = MsgpackDecoder(EngineCoreRequest).decode(MsgpackEncoder().encode(_filled(stock)))
    assert getattr(got, OURS) is False
    for name in stock.__struct_fields__:
        if name != "sampling_params":
            assert getattr(got, name) == getattr(_filled(stock), name), name

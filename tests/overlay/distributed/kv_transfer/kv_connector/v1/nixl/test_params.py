"""Which parameters can be used, field by field."""

from __future__ import annotations

import json

import pytest

from tests.lying_params import GOOD
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.params import (
    MAX_BLOCK_ID,
    MAX_TP_SIZE,
    find_problem,
    find_unsendable,
    peer_problem,
)

PEER = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        GOOD,
        {k: v for k, v in GOOD.items() if k != "tp_size"},
        {**GOOD, "remote_block_ids": ((0,), [MAX_BLOCK_ID])},
        {**GOOD, "remote_block_ids": [[], [7]]},
        {**GOOD, "tp_size": MAX_TP_SIZE, "remote_port": 65535},
        {**GOOD, "remote_request_id": "a:b é"},
        {**GOOD, "remote_num_tokens": None},
        {**GOOD, "remote_num_tokens": 48, "anything": object()},
        # What a router sends a prefill server, and what other connectors use.
        {"do_remote_decode": True, "do_remote_prefill": False, "remote_port": None},
        {"do_remote_decode": True, "remote_block_ids": None, "remote_engine_id": None},
        {"do_remote_prefill": False, "remote_block_ids": "anything"},
        {"lmcache.skip_save": True},
    ],
    ids=str,
)
def test_nothing_wrong(params: object) -> None:
    assert find_problem(params) is None


@pytest.mark.parametrize("field", [*PEER, "remote_block_ids"])
@pytest.mark.parametrize("dropped", [True, False])
def test_a_field_that_is_missing_or_null(field: str, dropped: bool) -> None:
    params = {k: v for k, v in GOOD.items() if k != field} if dropped else {**GOOD, field: None}
    problem = find_problem(params)
    assert problem is not None and problem.field == field
    assert (peer_problem(params) is None) == (field not in PEER)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("do_remote_prefill", "true"),
        ("do_remote_prefill", 1),
        ("do_remote_decode", []),
        *((field, value) for field in PEER[:3] for value in ("", 7, ["P"], "x" * 9999, "\ud800")),
        *(("remote_port", value) for value in (0, -1, 65536, 2**70, "5600", 5600.0, True)),
        *(("tp_size", value) for value in (0, -1, MAX_TP_SIZE + 1, "1", None, True)),
        *(
            ("remote_block_ids", value)
            for value in (
                [],
                "123",
                {"0": [1]},
                [1, 2],
                [[1], None],
                [[1], "2"],
                [[-1]],
                [[MAX_BLOCK_ID + 1]],
                [[True]],
                [[1.0]],
                [[None]],
                7,
            )
        ),
        ("remote_num_tokens", -1),
        ("remote_num_tokens", "48"),
    ],
)
def test_a_field_that_cannot_be_used(field: str, value: object) -> None:
    problem = find_problem({**GOOD, field: value})
    assert problem is not None and problem.field == field
    assert str(problem).startswith(f"kv_transfer_params.{field} ")


@pytest.mark.parametrize("params", ["text", ["list"], 7, True])
def test_what_is_no_object(params: object) -> None:
    assert str(find_problem(params)).startswith("kv_transfer_params must be an object")


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"remote_block_ids": [[2**64]]}, "remote_block_ids"),
        ({"other": {"deep": [-(2**63) - 1]}}, "other"),
        ({"other": {"\ud800": 1}}, "other"),
        ({"\ud800": 1}, ""),
        ({"other": ["\udfff"]}, "other"),
        ({"other": json.loads("[" * 40 + "]" * 40)}, "other"),
        (2**70, ""),
    ],
)
def test_what_the_wire_does_not_carry(params: object, field: str) -> None:
    problem = find_unsendable(params)
    assert problem is not None and problem.field == field
    str(problem).encode()  # it goes into an answer


@pytest.mark.parametrize("params", [None, {}, GOOD, "é", [2**64 - 1], {"a": {"b": -(2**63)}}])
def test_what_the_wire_carries(params: object) -> None:
    assert find_unsendable(params) is None


@pytest.mark.parametrize(("groups", "wrong"), [(None, False), (2, False), (1, True), (3, True)])
def test_groups(groups: int | None, wrong: bool) -> None:
    problem = find_problem({**GOOD, "remote_block_ids": [[1], [2]]}, groups=groups)
    assert (problem is not None) == wrong

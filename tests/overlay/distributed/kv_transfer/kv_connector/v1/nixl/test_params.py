"""Which parameters can be used, field by field."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.serial_utils import MsgpackEncoder

from tests.support.lying_params import GOOD
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


INTEGERS = st.one_of(
    st.integers(),
    st.sampled_from([-(2**63), -(2**63) - 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64]),
)
TEXT = st.text(st.characters(categories=("L", "Cs")), max_size=2)  # with halves of characters
LEAVES = st.one_of(st.none(), st.booleans(), INTEGERS, st.floats(allow_nan=False), TEXT)


@given(
    st.recursive(
        LEAVES,
        lambda inner: st.one_of(
            st.lists(inner, max_size=4),
            st.lists(inner, max_size=4).map(tuple),
            st.dictionaries(TEXT, inner, max_size=3),
        ),
        max_leaves=12,
    )
)
def test_it_says_what_the_wire_s_encoder_says(params: object) -> None:
    try:
        MsgpackEncoder().encode(params)
    except (OverflowError, UnicodeEncodeError):
        assert find_unsendable(params) is not None
    else:
        assert find_unsendable(params) is None


@pytest.mark.parametrize("where", [0, 70_000, 131_071])
@pytest.mark.parametrize("bad", [2**64, "\ud800", {"\udfff": 1}, [[2**70]]])
def test_one_bad_value_among_many_token_ids(bad: object, where: int) -> None:
    ids: list[object] = list(range(131_072))
    assert find_unsendable({**GOOD, "prompt_token_ids": ids}) is None
    ids[where] = bad
    problem = find_unsendable({**GOOD, "prompt_token_ids": ids})
    assert problem is not None and problem.field == "prompt_token_ids"


@pytest.mark.parametrize("name", ["x" * 65, "a\nb", "\x1b[31m", "é", "", "a b"])
def test_a_name_that_cannot_stand_in_a_message(name: str) -> None:
    problem = find_unsendable({name: 2**70})
    assert problem is not None and problem.field == ""


@pytest.mark.parametrize(("groups", "wrong"), [(None, False), (2, False), (1, True), (3, True)])
def test_groups(groups: int | None, wrong: bool) -> None:
    problem = find_problem({**GOOD, "remote_block_ids": [[1], [2]]}, groups=groups)
    assert (problem is not None) == wrong

"""Which parameters can be used, field by field."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.serial_utils import MsgpackEncoder

from tests.support.lying_params import GOOD
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.params import (
    MAX_BLOCK_ID,
    MAX_RANKS,
    are_for,
    asks_for_blocks,
    find_problem,
    find_unsendable,
    of_transfer,
    peer_problem,
    printable,
    said,
    unbracketed,
    without_unread,
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
        {**GOOD, "tp_size": MAX_RANKS, "remote_port": 65535},
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
        *(("tp_size", value) for value in (0, -1, MAX_RANKS + 1, "1", None, True)),
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


@pytest.mark.parametrize("field", ["dcp_size", "pp_size", "remote_registration_generation"])
@pytest.mark.parametrize("value", ["1", 1.0, True, -1, 2**63, [1]])
def test_a_peer_whose_numbers_are_none(field: str, value: object) -> None:
    """It is not talked to; that a release does not look at them is for others to know."""
    params = {**GOOD, field: value}
    problem = peer_problem(params)
    assert problem is not None and problem.field == field
    assert find_problem(params) is None


@pytest.mark.parametrize("field", ["dcp_size", "pp_size", "remote_registration_generation"])
def test_null_says_no_number(field: str) -> None:
    """A router may write it for what P, of an earlier release, has not said."""
    assert peer_problem({**GOOD, field: None}) is None
    assert said({**GOOD, field: None, "remote_num_tokens": None}) == GOOD | {
        "remote_num_tokens": None
    }
    assert said({**GOOD, field: 1}) == {**GOOD, field: 1}


@pytest.mark.parametrize(
    ("tensor", "stages", "good"),
    [(1, 1024, True), (1, 1025, False), (8, 128, True), (8, 129, False), (1024, 1, True)],
)
def test_ranks_are_counted_over_all_stages(tensor: int, stages: int, good: bool) -> None:
    problem = peer_problem({**GOOD, "tp_size": tensor, "pp_size": stages})
    assert (problem is None) == good


def test_a_peer_that_does_not_say_how_many_ranks_it_has_has_one_a_stage() -> None:
    params = {k: v for k, v in GOOD.items() if k != "tp_size"}
    assert peer_problem({**params, "pp_size": 1024}) is None
    assert peer_problem({**params, "pp_size": 1025}) is not None


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
        ({"other": json.loads("[" * 600 + "]" * 600)}, "other"),
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


@pytest.mark.parametrize(
    ("field", "most"),
    [("remote_engine_id", 4096), ("remote_request_id", 4096), ("remote_host", 255)],
)
def test_how_long_a_text_may_be(field: str, most: int) -> None:
    for good in (1, most):
        assert find_problem({**GOOD, field: "x" * good}) is None
    for bad in (0, most + 1):
        problem = find_problem({**GOOD, field: "x" * bad})
        assert str(problem) == (
            f"kv_transfer_params.{field} must have 1 to {most} characters, not {bad}"
        )


@pytest.mark.parametrize(
    ("field", "low", "high"),
    [("remote_port", 1, 65535), ("tp_size", 1, 1024), ("remote_num_tokens", 0, 2**63 - 1)],
)
def test_from_where_to_where_a_number_goes(field: str, low: int, high: int) -> None:
    for good in (low, high):
        assert find_problem({**GOOD, field: good}) is None
    for bad in (low - 1, high + 1):
        problem = find_problem({**GOOD, field: bad})
        assert str(problem) == f"kv_transfer_params.{field} must be from {low} to {high}"


@pytest.mark.parametrize(
    ("field", "low", "high"),
    [("dcp_size", 1, 1024), ("pp_size", 1, 1024), ("remote_registration_generation", 0, 2**63 - 1)],
)
def test_from_where_to_where_a_later_number_goes(field: str, low: int, high: int) -> None:
    for good in (low, high):
        assert peer_problem({**GOOD, "tp_size": 1, field: good}) is None
    for bad in (low - 1, high + 1):
        problem = peer_problem({**GOOD, "tp_size": 1, field: bad})
        assert str(problem) == f"kv_transfer_params.{field} must be from {low} to {high}"


def test_the_numbers_of_blocks() -> None:
    assert find_problem({**GOOD, "remote_block_ids": [[0, 2**31 - 1]]}) is None
    for bad in (-1, 2**31):
        problem = find_problem({**GOOD, "remote_block_ids": [[bad]]})
        assert str(problem) == (
            "kv_transfer_params.remote_block_ids must hold block numbers from 0 to 2147483647"
        )


def test_a_block_is_named_once_in_a_group() -> None:
    """0 is no block: a window's list has it for each block that it has left."""
    assert find_problem({**GOOD, "remote_block_ids": [[0, 0, 1]]}) is None
    problem = find_problem({**GOOD, "remote_block_ids": [[1, 2, 1]]})
    assert str(problem) == "kv_transfer_params.remote_block_ids must not name a block twice"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"do_remote_prefill": "yes"}, "do_remote_prefill must be true or false, not str"),
        ({"do_remote_decode": 0}, "do_remote_decode must be true or false, not int"),
        ({"remote_host": None}, "remote_host is missing"),
        ({"remote_host": 7}, "remote_host must be a string, not int"),
        ({"remote_host": "\ud800"}, "remote_host is not valid Unicode"),
        ({"remote_port": None}, "remote_port must be an integer, not null"),
        ({"remote_block_ids": None}, "remote_block_ids is missing"),
        ({"remote_block_ids": [None]},
         "remote_block_ids must hold lists of block numbers, not null"),
    ],
)  # fmt: skip
def test_what_is_said(change: dict[str, object], reason: str) -> None:
    assert str(find_problem({**GOOD, **change})) == f"kv_transfer_params.{reason}"


def test_what_is_said_of_other_groups() -> None:
    assert str(find_problem(GOOD, groups=2)) == (
        "kv_transfer_params.remote_block_ids has 1 KV-cache groups, this engine has 2"
    )


@pytest.mark.parametrize("flag", ["do_remote_prefill", "do_remote_decode"])
@pytest.mark.parametrize("value", [True, False, None])
def test_a_role_may_be_null(flag: str, value: bool | None) -> None:
    assert find_problem({**GOOD, flag: value}) is None


@pytest.mark.parametrize(
    ("params", "asks"),
    [
        ({}, False),
        ({"do_remote_prefill": True}, True),
        ({"do_remote_decode": True}, False),
        ({"do_remote_decode": True, "remote_block_ids": [[1]]}, True),
        ({"do_remote_decode": False, "remote_block_ids": [[1]]}, False),
        ({"remote_block_ids": [[1]]}, False),
    ],
)
def test_who_asks_for_blocks(params: dict[str, object], asks: bool) -> None:
    assert asks_for_blocks(params) is asks


OFFERED = {"do_remote_decode": True, "remote_block_ids": [[1]], "tp_size": 2}


@pytest.mark.parametrize(
    ("params", "reads_back", "left"),
    [
        (OFFERED, False, {**OFFERED, "remote_block_ids": None}),
        (OFFERED, True, OFFERED),
        (GOOD, False, GOOD),
        ({"do_remote_decode": True}, False, {"do_remote_decode": True}),
        (None, False, None),
    ],
)
def test_what_is_offered_is_left_out_unless_it_is_read(
    params: object, reads_back: bool, left: object
) -> None:
    assert without_unread(params, reads_back=reads_back) == left
    assert reads_back or without_unread(params) == left


@pytest.mark.parametrize("host", ["::1", "[::1", "::1]", "p"])
def test_an_address_may_stand_in_brackets(host: str) -> None:
    assert unbracketed(host) == host
    assert unbracketed(f"[{host}]") == host


@pytest.mark.parametrize("wrap", [lambda v: [v], lambda v: {"k": v}, lambda v: (v,)])
def test_how_deep_a_field_may_be(wrap: Callable[[object], object]) -> None:
    """What is deepest counts as a level."""
    value: object = 1
    for _ in range(299):
        value = wrap(value)
    MsgpackEncoder().encode(value)
    assert pickle.loads(pickle.dumps(copy.deepcopy(value))) == value  # noqa: S301 - ours
    assert find_unsendable({"other": value}) is None
    problem = find_unsendable({"other": wrap(value)})
    assert str(problem) == "kv_transfer_params.other must not be nested deeper than 300 levels"


def test_what_is_said_of_what_cannot_be_sent() -> None:
    assert str(find_unsendable({"other": [2**64]})) == (
        "kv_transfer_params.other must not hold integers of more than 64 bits"
    )
    assert str(find_unsendable({"other": "\ud800"})) == (
        "kv_transfer_params.other is not valid Unicode"
    )


@pytest.mark.parametrize("name", ["a", "x" * 64, "A-z_0.9"])
def test_a_name_that_can_stand_in_a_message(name: str) -> None:
    problem = find_unsendable({name: 2**70})
    assert problem is not None and problem.field == name


def test_halves_of_a_character_in_two_texts_are_none() -> None:
    assert find_unsendable({"other": ["\ud83d", "\ude00"]}) is not None


@pytest.mark.parametrize(
    ("name", "is_of"),
    [
        ("do_remote_prefill", True),
        ("remote_anything", True),
        ("tp_size", True),
        ("dcp_size", True),
        ("pp_size", True),
        ("transfer_mode", True),
        ("lmcache.remote_", False),
        ("remote_kv_source", False),  # of the offloading connector's tier on peers
        ("remote_prefiller", False),
        ("remote_decoder", False),
        ("size", False),
        ("", False),
    ],
)
def test_which_fields_a_prefill_server_hands_out(name: str, is_of: bool) -> None:
    assert of_transfer(name) is is_of


@pytest.mark.parametrize(
    ("connector", "path", "ours"),
    [
        ("NixlConnector", None, True),
        ("NixlPullConnector", "", True),
        ("NixlPushConnector", None, False),
        ("NixlConnector", "somebody.elses", False),
        (None, None, False),
    ],
)
def test_for_whom_parameters_are(connector: str | None, path: str | None, ours: bool) -> None:
    assert bool(are_for(connector, path)) is ours


def test_a_text_for_the_log_is_short_and_moves_no_terminal() -> None:
    assert printable("id-1 é") == "id-1 é"
    assert printable("a\x1b[2J\nb") == "a?[2J?b"
    assert printable("x" * 201) == "x" * 200


@pytest.mark.parametrize(
    ("values", "fits"),
    [
        ([-(2**63), 2**64 - 1], True),
        ([-(2**63) - 1, 0], False),
        ([0, 2**64], False),
        ([-(2**63) - 1, 2**64 - 1], False),
    ],
)
def test_the_least_and_the_greatest_integer_in_one_list(values: list[int], fits: bool) -> None:
    assert (find_unsendable({"other": values}) is None) is fits


def test_a_name_that_is_no_text() -> None:
    problem = find_unsendable({7: 2**70})
    assert problem is not None and problem.field == ""


def test_a_number_that_is_missing() -> None:
    params = {k: v for k, v in GOOD.items() if k != "remote_port"}
    assert str(find_problem(params)) == "kv_transfer_params.remote_port is missing"

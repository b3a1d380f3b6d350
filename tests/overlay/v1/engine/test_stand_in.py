"""Stand-ins: what they are called, what they carry, and that clients' requests are none.

Which connectors take one is in test_async_llm.py, what several connectors do with one in
test_multi_connector.py.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from tests.support.serving_app import REMOTE
from vllm_overlay.v1.engine.stand_in import is_stand_in, make_stand_in, stand_in_id


@pytest.mark.parametrize(
    "name", ["x" * 5_000_000, "a\nb\r\x1b[31m", "\u2028\udcff", "", "-rejected-"]
)
def test_a_name_is_short_and_clean(name: str) -> None:
    request_id = stand_in_id(name)
    assert re.fullmatch(r".{0,64}-rejected-[0-9a-f]{32}", request_id)
    assert request_id.isprintable()
    aborted: Any = SimpleNamespace(request_id=request_id, abort_immediately=True)
    assert is_stand_in(aborted)


def test_two_of_one_name_are_two() -> None:
    assert stand_in_id("x") != stand_in_id("x")


def test_what_upstream_aborts_at_once_is_none_of_ours() -> None:
    for name, abort in (("cmpl-1-deadbeef", True), (stand_in_id("x"), False)):
        request: Any = SimpleNamespace(request_id=name, abort_immediately=abort)
        assert not is_stand_in(request)


@pytest.mark.parametrize("rank", [None, 0, 3])
def test_it_reaches_the_engine_core_with_what_it_gives_up(rank: int | None) -> None:
    given = dict(REMOTE)
    made = make_stand_in(stand_in_id("x"), given, rank)
    given["remote_host"] = "changed later"
    sent = MsgpackDecoder(EngineCoreRequest).decode(MsgpackEncoder().encode(made))
    assert sent.data_parallel_rank == rank
    request = Request.from_engine_core_request(sent, None)
    assert is_stand_in(request)
    assert request.kv_transfer_params == REMOTE
    assert request.max_tokens == request.num_prompt_tokens == 1

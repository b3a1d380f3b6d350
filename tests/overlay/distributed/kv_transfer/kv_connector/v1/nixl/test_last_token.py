"""0.19.0 to 0.28.0: whose last token is left to D, when, and whose is not."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip(
    "vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.last_token",
    reason="0.19.0 to 0.28.0",
)

from tests.support.hybrid_engine import engine_of
from tests.support.nixl_worker import attempt
from tests.support.prefill_engine import PrefillEngine
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.last_token import (
    leave_out_last_token,
    leave_out_last_token_for,
)

PROMPT = list(range(1000, 1049))
FOR_D = {"do_remote_decode": True}
FROM_P = {
    "do_remote_prefill": True,
    "remote_block_ids": [[1, 2, 3, 4], [1]],
    "remote_engine_id": "other",
    "remote_request_id": "asked-at-other",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
}


class Part:
    """NIXL's part of a scheduler that upstream's tests make without a constructor."""


def hybrid() -> PrefillEngine:
    return engine_of(PrefillEngine, mode="align", prefix_caching=True)


def test_it_is_left_out_when_the_request_is_added_and_once() -> None:
    engine = hybrid()
    request = engine.prefill("asked", PROMPT, max_tokens=9)
    assert request.prompt_token_ids == list(request.all_token_ids) == PROMPT[:-1]
    assert (request.num_prompt_tokens, request.max_tokens) == (len(PROMPT) - 1, 1)
    engine.run(4)
    assert engine.handed_out == {"asked": PROMPT[:-1]}


def test_the_list_that_the_request_came_with_stays_whole() -> None:
    """In one process it is the next choice's, and what the client's prompt is counted by."""
    engine = hybrid()
    request = engine.prefill("asked", PROMPT, params={})
    request.kv_transfer_params = dict(FOR_D)
    came_with = request.prompt_token_ids
    leave_out_last_token_for(engine.scheduler.connector, request)
    assert request.prompt_token_ids == PROMPT[:-1]
    assert came_with == PROMPT


@pytest.mark.parametrize(
    "params",
    [None, {}, FROM_P, FROM_P | FOR_D, {"do_remote_decode": False}],
    ids=["none", "no role", "for itself", "for a D, loaded", "no"],
)
def test_all_others_keep_it(params: dict[str, Any] | None) -> None:
    engine = hybrid()
    request = engine.send("asked", PROMPT, params)
    assert request.prompt_token_ids == PROMPT
    assert request.max_tokens == 2


@pytest.mark.parametrize("params", [{"do_remote_decode": 1}, {"do_remote_decode": "yes"}, [1], "x"])
def test_parameters_that_nobody_has_looked_at_are_left_to_who_does(params: object) -> None:
    engine = hybrid()
    request = engine.send("asked", PROMPT, None)
    request.kv_transfer_params = params
    leave_out_last_token_for(engine.scheduler.connector, request)
    assert request.prompt_token_ids == PROMPT
    assert request.kv_transfer_params == params


def test_one_that_loads_as_well_stays_whole_when_it_comes_back_to_the_queue() -> None:
    engine = hybrid()
    request = engine.send("asked", PROMPT, FROM_P | FOR_D)
    assert request.kv_transfer_params is not None
    request.kv_transfer_params["do_remote_prefill"] = False  # as once it has been told to load
    connector = engine.scheduler.connector
    assert connector is not None
    assert connector.get_num_new_matched_tokens(request, len(PROMPT) - 1) == (0, False)
    assert request.prompt_token_ids == PROMPT


def test_one_that_loads_as_well_is_computed_where_all_of_it_is_cached() -> None:
    """A chain of engines: what the first has computed is in the cache of the second already."""
    engine = hybrid()
    engine.prefill("before", PROMPT, params={})
    engine.run(6)
    engine.prefill("asked", PROMPT, params=FROM_P | FOR_D)
    assert attempt(engine.run, 6) is None
    assert engine.tokens["asked"]


def test_embeddings_are_shortened_with_either_role() -> None:
    """Of those nothing is ever loaded, so stock shortens them."""
    engine = hybrid()
    for params in (FOR_D, FOR_D | FROM_P):
        request = engine.send("asked", PROMPT, None)
        del engine.scheduler.requests["asked"]
        request.prompt_token_ids, request.prompt_embeds = None, PROMPT
        request.kv_transfer_params = dict(params)
        leave_out_last_token_for(engine.scheduler.connector, request)
        assert request.prompt_embeds == PROMPT[:-1]
        assert request.num_prompt_tokens == len(PROMPT) - 1


def test_models_without_states_keep_it() -> None:
    engine = PrefillEngine()
    request = engine.prefill("asked", PROMPT)
    assert request.prompt_token_ids == PROMPT


def test_nothing_happens_without_nixl() -> None:
    request = hybrid().send("asked", PROMPT, None)
    request.kv_transfer_params = dict(FOR_D)
    leave_out_last_token_for(None, request)
    other: Any = type("Other", (), {"connector_scheduler": Part()})()
    leave_out_last_token_for(other, request)
    leave_out_last_token(Part(), request)
    assert request.prompt_token_ids == PROMPT

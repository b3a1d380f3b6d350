"""Up to 0.26.0: slots for guesses are left out on both sides, or all is as on stock."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.regressions import test_50153
from tests.regressions.test_50153 import (
    GUESSES,
    last_state,
    prefilled,
    received,
    slots_of,
)
from tests.support.decode_engine import DecodeEngine
from tests.support.hybrid_engine import engine_of
from tests.support.prefill_engine import PrefillEngine
from tests.support.release import since

pytest.importorskip(
    "vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.state_slots", reason="up to 0.26.0"
)

from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.state_slots import states_only

FIELD = "remote_num_speculative_blocks"
MODES = [("none", "none"), ("align", "align"), ("none", "align"), ("align", "none")]


@pytest.mark.parametrize("modes", MODES, ids="-".join)
@pytest.mark.parametrize("guesses", [(0, 0), (2, 2), *GUESSES])
def test_it_does_not_matter_who_keeps_states_how(
    guesses: tuple[int, int], modes: tuple[str, str]
) -> None:
    p = engine_of(PrefillEngine, mode=modes[0], guesses=guesses[0])
    d = engine_of(DecodeEngine, mode=modes[1], guesses=guesses[1])
    params = prefilled(p)
    theirs = slots_of(p)[last_state(modes[0])]
    assert received(p, d, params)[last_state(modes[1])] == {theirs}


@pytest.mark.parametrize("said", [None, -1, "2", 2.0, True, [2]])
def test_nothing_is_left_out_on_the_word_of_a_peer_that_does_not_say_how_much(said: object) -> None:
    d = engine_of(DecodeEngine, mode="align", guesses=2)
    params = {"remote_block_ids": [[1, 2, 3], [0, 4, 5, 6]], FIELD: said}
    assert_left_alone(d, params)
    del params[FIELD]
    assert_left_alone(d, params)


def test_nothing_is_left_out_where_nobody_guesses() -> None:
    params = {"remote_block_ids": [[1, 2, 3], [0, 0, 4]], FIELD: 0}
    assert_left_alone(engine_of(DecodeEngine, mode="align", guesses=0), params)


def test_nothing_is_left_out_of_another_number_of_groups() -> None:
    assert_left_alone(
        engine_of(DecodeEngine, mode="none", guesses=2), {"remote_block_ids": [[1, 2]], FIELD: 2}
    )


def assert_left_alone(d: DecodeEngine, params: dict[str, Any]) -> None:
    """Assert that D reads all that P names into all that it has, as on stock."""
    ours, before = ([7, 8, 9], [10, 11, 12]), copy.deepcopy(params)
    side = d.scheduler.connector.connector_scheduler
    assert states_only(side, params, ours) is ours
    assert params == before


@pytest.mark.parametrize("guesses", [(2, 0), (2, 2)])
def test_states_that_go_by_position_are_all_read(guesses: tuple[int, int]) -> None:
    p = engine_of(PrefillEngine, mode="all", guesses=guesses[0])
    d = engine_of(DecodeEngine, mode="all", guesses=guesses[1])
    params = prefilled(p)
    theirs = params["remote_block_ids"][1][:3]
    assert received(p, d, params)[:3] == [{slot} for slot in theirs]


@pytest.mark.parametrize(
    ("mode", "ours", "theirs"), [("all", [10, 11, 12], [4, 5, 6]), ("align", [12], [6])]
)
def test_of_states_that_do_not_go_by_position_the_last_is_read(
    mode: str, ours: list[int], theirs: list[int]
) -> None:
    d = engine_of(DecodeEngine, mode=mode, guesses=2)
    params = {"remote_block_ids": [[1, 2, 3], [4, 5, 6, 7, 8]], FIELD: 2}
    side = d.scheduler.connector.connector_scheduler
    assert states_only(side, params, ([7, 8, 9], [10, 11, 12, 13, 14])) == ([7, 8, 9], ours)
    assert params["remote_block_ids"] == [[1, 2, 3], theirs]


UNSAID = pytest.param(
    False, marks=pytest.mark.skipif(since("0.23.0"), reason="upstream refuses what it cannot pair")
)


@pytest.mark.parametrize("said", [True, UNSAID])
@pytest.mark.parametrize("modes", [("all", "all"), ("all", "none")], ids="-".join)
def test_the_state_before_the_last_one_is_not_taken_for_it(
    modes: tuple[str, str], said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P still has it: of the prompt's third block there are no more tokens than P may guess."""
    monkeypatch.setattr(test_50153, "TOKENS", 35)
    p = engine_of(PrefillEngine, mode=modes[0], guesses=2)
    d = engine_of(DecodeEngine, mode=modes[1], guesses=2)
    params = prefilled(p)
    *_, last, _, _ = params["remote_block_ids"][1]
    if not said:
        del params[FIELD]
    got = received(p, d, params)
    assert got[last_state(modes[1])] == {last}


@pytest.mark.parametrize("mode", ["none", "align", "all"])
def test_p_names_what_stock_names_and_says_how_many_are_for_guesses(mode: str) -> None:
    answer = prefilled(engine_of(PrefillEngine, mode=mode, guesses=2))
    assert answer[FIELD] == 2
    assert len(answer["remote_block_ids"][1]) == last_state(mode) + 1 + 2


def test_p_without_states_says_nothing() -> None:
    assert FIELD not in prefilled(PrefillEngine(groups=("full", "sliding")))


def test_a_hit_leaves_nothing_to_read() -> None:
    p, d = (
        engine_of(PrefillEngine, mode="none", guesses=2),
        engine_of(DecodeEngine, mode="none", guesses=0),
    )
    params = prefilled(p)
    before = params["remote_block_ids"]
    request = d.send("hit", range(40), params)
    d.scheduler.connector.update_state_after_alloc(
        request, d.scheduler.kv_cache_manager.empty_kv_cache_blocks, 0
    )
    assert request.kv_transfer_params["remote_block_ids"] == before

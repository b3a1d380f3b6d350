"""Which loads get the slots of one of all but the last token, and what P keeps for its reader."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.request import RequestStatus

from tests.regressions import test_k22
from tests.support.decode_engine import DecodeEngine
from tests.support.nixl_worker import GroupKind, connect, nixl_of
from vllm_overlay.v1.core.sched.last_window import allocate_slots, remove_skipped_blocks

LOST = 47
"""Tokens of a prompt whose last one sees the last of a block that the next does not see."""


class NixlPullConnector:
    """Reads from P."""

    def __init__(self, mode: str | None = "pull") -> None:
        self.connector_scheduler = mode and SimpleNamespace(_TRANSFER_MODE=mode)


class OtherConnector:
    """Loads whatever it likes."""

    connector_scheduler = object()


class Several:
    """As `MultiConnector`: the second of two loads for the request."""

    def __init__(self, *connectors: object) -> None:
        self._connectors = connectors
        self._requests_to_connector = {"asked": 1}


def given(
    prompt: int = LOST,
    *,
    hits: int = 0,
    loaded: int | None = None,
    waits: bool = True,
    windows: tuple[int, ...] = (32,),
    block_size: int = 16,
    connector: object = None,
    groups: tuple[Any, ...] = (),
    named: list[list[int]] | None = None,
) -> tuple[int, int]:
    """Return how many new and how many loaded tokens the KV-cache manager is asked for."""
    asked: list[tuple[int, int]] = []

    def manager(request: object, new: int, **how: Any) -> None:  # noqa: ANN401
        assert how["num_new_computed_tokens"] == hits
        assert how["delay_cache_blocks"] == waits
        assert how["num_lookahead_tokens"] == 3
        asked.append((new, how["num_external_computed_tokens"]))

    full = SimpleNamespace(block_size=block_size, get_num_skipped_tokens=lambda _: 0)
    sliding = [
        SimpleNamespace(
            block_size=16,
            get_num_skipped_tokens=lambda tokens, window=window: max(0, tokens - window + 1),
        )
        for window in windows
    ]
    scheduler: Any = SimpleNamespace(
        connector=connector or NixlPullConnector(),
        kv_cache_manager=SimpleNamespace(
            allocate_slots=manager,
            coordinator=SimpleNamespace(single_type_managers=(full, *sliding)),
        ),
        kv_cache_config=SimpleNamespace(kv_cache_groups=groups),
    )
    params = named and {"remote_block_ids": named}
    request: Any = SimpleNamespace(request_id="asked", num_tokens=prompt, kv_transfer_params=params)
    allocate_slots(
        scheduler,
        request,
        0 if waits else 1,
        num_new_computed_tokens=hits,
        num_external_computed_tokens=prompt - hits if loaded is None else loaded,
        delay_cache_blocks=waits,
        num_lookahead_tokens=3,
    )
    [found] = asked
    return found


@pytest.mark.parametrize("hits", [0, 16, 32])
def test_a_load_that_would_lose_a_token_is_one_of_all_but_the_last(hits: int) -> None:
    assert given(hits=hits) == (1, LOST - hits - 1)


def test_nothing_but_the_last_token_is_no_load_of_all_but_that() -> None:
    assert given(hits=LOST - 1) == (0, 1)
    assert given(hits=LOST - 2) == (1, 1)


@pytest.mark.parametrize("length", [n for n in range(2, 100) if n % 16 != 15 or n < 33])
def test_one_that_loses_none_is_as_on_stock(length: int) -> None:
    assert given(length) == (0, length)


def test_one_of_a_part_of_the_prompt_is_as_on_stock() -> None:
    assert given(LOST + 1, loaded=LOST) == (0, LOST)


def test_so_is_one_in_the_step_that_computes() -> None:
    assert given(waits=False) == (1, LOST)


def test_so_is_a_last_token_that_begins_a_block() -> None:
    """It would be a block that is computed: a step zeroes those, where it zeroes at all."""
    assert given(49, windows=(34,)) == (0, 49)
    assert given(41, windows=(26,), block_size=8) == (0, 41)


def test_so_is_one_beside_states() -> None:
    spec = MambaSpec(block_size=16, shapes=((1,),), dtypes=(torch.float16,))
    assert given(groups=(SimpleNamespace(kv_cache_spec=spec),)) == (0, LOST)


@pytest.mark.parametrize(
    ("connector", "taken"),
    [
        (Several(OtherConnector(), NixlPullConnector()), True),
        (Several(NixlPullConnector(), OtherConnector()), False),
        (OtherConnector(), False),
        (NixlPullConnector("push"), False),
        (NixlPullConnector(None), False),
        (Mock(), False),
    ],
    ids=["NIXL among several", "another among several", "another", "push", "a worker's", "any"],
)
def test_only_what_nixl_reads(connector: object, taken: bool) -> None:
    assert given(connector=connector) == ((1, LOST - 1) if taken else (0, LOST))


@pytest.mark.parametrize("given_up", [False, True])
@pytest.mark.parametrize("further", [0, 2], ids=["", "P went on"])
@pytest.mark.parametrize("in_front", [[], [0]], ids=["", "a longer window"])
@pytest.mark.parametrize("length", test_k22.LENGTHS)
def test_a_block_that_p_does_not_name_is_not_taken(
    length: int, in_front: list[int], further: int, given_up: bool
) -> None:
    """A stock P names the null block for it: read, that would be a prefix that others hit."""
    engine = test_k22.decoding()
    blocks = list(range(test_k22.FIRST, test_k22.FIRST + -(-length // 16) + further))
    window = blocks[-3 - further :]
    if given_up:
        window[0] = 0
    window = (in_front + window)[-len(blocks) :]
    engine.ask("asked", range(length), [blocks, window])
    engine.advance()
    first = (length - test_k22.WINDOW) // 16
    _, ours = engine.scheduler.kv_cache_manager.get_block_ids("asked")
    assert (ours[first] == 0) is given_up
    assert (0, first) not in test_k22.arrivals(engine)


@pytest.mark.parametrize(
    ("block_size", "windows", "named"),
    [
        (32, (32,), [[1, 2, 3], [1, 2, 3, 4, 5]]),  # P went on, by fewer of its larger blocks
        (16, (32, 31), [[1, 2, 3], [1, 2, 3], [0, 2, 3]]),  # the shorter window begins with a block
    ],
)
def test_what_p_need_not_name_of_other_groups(
    block_size: int, windows: tuple[int, ...], named: list[list[int]]
) -> None:
    groups = (SimpleNamespace(kv_cache_spec=None),) * len(named)
    taken = given(block_size=block_size, windows=windows, groups=groups, named=named)
    assert taken == (1, LOST - 1)


@pytest.mark.parametrize("length", test_k22.LENGTHS)
def test_one_that_d_has_itself_need_not_be_named(length: int) -> None:
    first = (length - test_k22.WINDOW) // 16
    engine = test_k22.decoding(hits=first + 1)
    blocks = list(range(test_k22.FIRST, test_k22.FIRST + -(-length // 16)))
    engine.ask("asked", range(length), [blocks, [0, *blocks[-2:]]])
    engine.advance()
    _, ours = engine.scheduler.kv_cache_manager.get_block_ids("asked")
    assert ours[first] != 0
    assert test_k22.arrivals(engine) == {
        (test_k22.FIRST + i, i) for i in range(first + 1, first + 3)
    }


@pytest.mark.parametrize("length", test_k22.LENGTHS)
def test_a_list_that_does_not_reach_back_so_far_is_as_on_stock(length: int) -> None:
    """P went on, and of its window's blocks some come after the prompt."""
    engine = test_k22.decoding()
    blocks = list(range(test_k22.FIRST, test_k22.FIRST + -(-length // 16) + 1))
    engine.ask("asked", range(length), [blocks, blocks[-3:]])
    engine.advance()
    _, ours = engine.scheduler.kv_cache_manager.get_block_ids("asked")
    assert ours[(length - test_k22.WINDOW) // 16] == 0


@pytest.mark.parametrize("groups", [("full", "sliding"), ("full",), ("sliding",)])
def test_the_same_blocks_but_for_the_windows_one(groups: tuple[GroupKind, ...]) -> None:
    """Of the real manager, and only where one would be missing."""
    for length in range(44, 51):
        engine = DecodeEngine(groups=groups)
        connect(engine.worker, "P", num_blocks=64)
        blocks = list(range(1, 1 + -(-length // 16)))
        engine.ask("asked", range(length), [blocks] * len(groups))
        engine.step()
        manager = engine.scheduler.kv_cache_manager
        null = manager.block_pool.null_block.block_id
        for kind, table in zip(groups, manager.get_block_ids("asked"), strict=True):
            empty = (length - 32) // 16 if kind == "sliding" else 0
            assert [block == null for block in table] == [i < empty for i in range(len(blocks))]


READ = {"do_remote_decode": True}


def kept(
    *,
    computed: int = LOST,
    name: str = "total_computed_tokens",
    params: object = READ,
    connector: object = None,
    groups: tuple[Any, ...] = (),
    known: bool = True,
) -> dict[str, object]:
    """Return what the KV-cache manager of P is asked to give up."""
    asked: list[dict[str, object]] = []
    request = SimpleNamespace(
        num_prompt_tokens=LOST, num_computed_tokens=LOST, kv_transfer_params=params
    )
    scheduler: Any = SimpleNamespace(
        connector=connector or NixlPullConnector(),
        requests={"asked": request} if known else {},
        kv_cache_manager=SimpleNamespace(remove_skipped_blocks=lambda **how: asked.append(how)),
        kv_cache_config=SimpleNamespace(kv_cache_groups=groups),
    )
    remove_skipped_blocks(scheduler, request_id="asked", **{name: computed}, num_prompt_tokens=9)
    [found] = asked
    assert found.pop("request_id") == "asked"
    assert found.pop("num_prompt_tokens") == 9
    return found


@pytest.mark.parametrize("name", ["total_computed_tokens", "processed_computed_tokens"])
@pytest.mark.parametrize("computed", [LOST - 1, LOST, LOST + 5])
def test_p_keeps_what_the_last_token_of_the_prompt_sees(computed: int, name: str) -> None:
    assert kept(computed=computed, name=name) == {name: LOST - 1}


def test_what_was_not_computed_is_not_given_up() -> None:
    assert kept(computed=16) == {"total_computed_tokens": 16}


@pytest.mark.parametrize("params", [None, {}])
def test_what_nobody_transfers_is_given_up_as_on_stock(params: object) -> None:
    assert kept(params=params) == {"total_computed_tokens": LOST}


@pytest.mark.parametrize("length", [LOST, LOST + 1])
def test_a_client_that_leaves_d_frees_no_block_that_is_read_into(length: int) -> None:
    engine = DecodeEngine(groups=("full", "sliding"))
    connect(engine.worker, "P", num_blocks=64)
    engine.ask("asked", range(length), [[1, 2, 3], [1, 2, 3]])
    engine.step()
    null = engine.scheduler.kv_cache_manager.block_pool.null_block.block_id
    read_into = engine.blocks_of("asked") - {null}
    engine.scheduler.finish_requests("asked", RequestStatus.FINISHED_ABORTED)
    assert engine.step().reusable.isdisjoint(read_into)
    nixl = nixl_of(engine.worker)
    nixl.finish(*nixl.in_flight())
    engine.step()
    assert read_into <= engine.step().reusable


@pytest.mark.parametrize("computed", [LOST - 1, LOST, LOST + 1])
def test_of_states_p_keeps_the_one_after_what_it_has_computed(computed: int) -> None:
    spec = MambaSpec(block_size=16, shapes=((1,),), dtypes=(torch.float16,))
    found = kept(computed=computed, groups=(SimpleNamespace(kv_cache_spec=spec),))
    assert found == {"total_computed_tokens": min(computed, LOST)}


def test_so_is_what_nobody_knows() -> None:
    assert kept(known=False) == {"total_computed_tokens": LOST}


@pytest.mark.parametrize(
    ("connector", "keeps"),
    [
        (Several(OtherConnector(), NixlPullConnector()), True),
        (Several(OtherConnector()), False),
        (OtherConnector(), False),
        (NixlPullConnector("push"), False),
        (Mock(), False),
    ],
    ids=["NIXL among several", "others", "another", "NIXL that pushes", "anything"],
)
def test_p_keeps_it_for_nixl_alone(connector: object, keeps: bool) -> None:
    assert kept(connector=connector) == {"total_computed_tokens": LOST - 1 if keeps else LOST}


@pytest.mark.parametrize("length", range(33, 81))
@pytest.mark.parametrize("step_tokens", [None, 16])
def test_p_names_the_window_of_any_length(length: int, step_tokens: int | None) -> None:
    test_k22.test_p_names_them(length, step_tokens)


@pytest.mark.parametrize("config", test_k22.HOW, ids=["async", "sync"])
@pytest.mark.parametrize("length", range(33, 81))
def test_any_length_is_answered_from_what_was_received(length: int, config: dict[str, Any]) -> None:
    test_k22.test_the_answer_starts_from_what_was_received(length, config)

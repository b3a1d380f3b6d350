"""What counts of the prefix cache, what connectors are told of it, and what statistics say."""

from __future__ import annotations

from math import ceil
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from tests.regressions.test_48425 import (
    BLOCK,
    EARLIER,
    OTHER,
    SHARED,
    TO_D,
    TURNS,
    UNIT,
    make,
)
from tests.support.hybrid_engine import engine_of
from tests.support.nixl_worker import connect
from tests.support.overlapped_engine import OverlappedEngine
from tests.support.state_engine import StateEngine

hits = pytest.importorskip("vllm_overlay.v1.core.sched.prefix_hits", reason="0.24.0 to 0.26.0")

FULL = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float16)
STATE = MambaSpec(block_size=BLOCK, shapes=((8,),), dtypes=(torch.float16,))


class NixlPullConnector:
    """Reads from P."""


class OtherConnector:
    """Loads whatever it likes."""


class Several:
    """As `MultiConnector`."""

    def __init__(self, *connectors: object) -> None:
        self._connectors = connectors


def found(*groups: tuple[Any, float], connector: object) -> tuple[Any, int]:
    """What counts where groups of these kinds have so many blocks, and 1 block is what all have."""

    def apart(*_: object) -> tuple[Any, tuple[int, ...]]:
        blocks = tuple(["block"] * ceil(n) for _, n in groups)
        return blocks, tuple(int(n * BLOCK) for _, n in groups)

    coordinator = SimpleNamespace(
        find_longest_cache_hit_per_group=apart,
        find_longest_cache_hit=lambda *_: ((["agreed"],) * len(groups), BLOCK, 0),
        single_type_managers=[SimpleNamespace(block_size=BLOCK) for _ in groups],
    )
    config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=s) for s, _ in groups])
    scheduler: Any = SimpleNamespace(
        block_size=BLOCK,
        connector=connector,
        kv_cache_config=config,
        kv_cache_manager=SimpleNamespace(coordinator=coordinator),
    )
    blocks, local = hits.hits_before_load(scheduler, Mock(num_tokens=100))
    return [len(one) for one in blocks], max(local)


@pytest.mark.parametrize(
    ("groups", "nixl", "other"),
    [
        ([(FULL, 4), (STATE, 4)], ([4, 4], 4), ([4, 4], 4)),
        ([(FULL, 4), (STATE, 0)], ([4, 0], 4), ([4, 0], 4)),
        ([(FULL, 2), (STATE, 4)], ([2, 0], 2), ([1, 1], 1)),
        ([(FULL, 0), (STATE, 4)], ([0, 0], 0), ([1, 1], 1)),
        ([(FULL, 4), (FULL, 3), (STATE, 1)], ([4, 3, 1], 4), ([1, 1, 1], 1)),
        ([(STATE, 4), (STATE, 4)], ([0, 0], 0), ([1, 1], 1)),
        ([(FULL, 1.5), (STATE, 1.5)], ([1, 1], 1), ([2, 2], 1.5)),
        ([(FULL, 2.5), (STATE, 1)], ([2, 1], 2), ([3, 1], 2.5)),
        ([(FULL, 0.5), (STATE, 2.5)], ([0, 0], 0), ([1, 1], 1)),
        ([(FULL, 1.25), (STATE, 1.75)], ([1, 1], 1), ([1, 1], 1)),
    ],
)
def test_what_full_attention_has_counts(
    groups: list[tuple[Any, float]],
    nixl: tuple[list[int], float],
    other: tuple[list[int], float],
) -> None:
    for connector, (blocks, local) in {
        NixlPullConnector(): nixl,
        OtherConnector(): other,
        Several(NixlPullConnector(), OtherConnector()): other,
    }.items():
        assert found(*groups, connector=connector) == (blocks, local * BLOCK)


def test_a_plugins_coordinator_may_not_say_what_more_there_is() -> None:
    coordinator = SimpleNamespace(find_longest_cache_hit=lambda *_: ((["agreed"],), BLOCK))
    scheduler: Any = SimpleNamespace(kv_cache_manager=SimpleNamespace(coordinator=coordinator))
    assert hits._agreed_hits(scheduler, Mock(num_tokens=100)) == ((["agreed"],), BLOCK, 0)


def told(engine: OverlappedEngine, answers: list[int | None]) -> list[int]:
    """Have the connector load nothing, and answer so in turn; the hits that it was told of."""
    connector, heard = engine.scheduler.connector, []

    def answer(_: object, local: int) -> tuple[int | None, bool]:
        heard.append(local)
        return answers.pop(0), False

    connector.get_num_new_matched_tokens = answer
    return heard


@pytest.mark.parametrize("preempted", [0, 1])
def test_a_lookup_counts_once_for_what_is_used(preempted: int) -> None:
    engine = make(log_stats=True)
    engine.ask("earlier", EARLIER)
    assert engine.run()
    engine.scheduler.kv_cache_manager.make_prefix_cache_stats()
    heard = told(engine, [None, 0])
    prompt = [*SHARED, *OTHER]
    engine.ask("second", prompt)
    engine.scheduler.requests["second"].num_preemptions = preempted
    engine.scheduler.schedule()
    engine.scheduler.kv_cache_manager.make_prefix_cache_stats()
    engine.scheduler.schedule()
    assert heard == [len(SHARED)] * 2
    stats = engine.scheduler.kv_cache_manager.make_prefix_cache_stats()
    counted = [stats.requests, stats.queries, stats.hits]
    if preempted:
        assert counted == [0, 0, 0]
        counted = [stats.preempted_requests, stats.preempted_queries, stats.preempted_hits]
    assert counted == [1, len(prompt), 0]


def test_who_does_not_read_the_cache_does_not_count() -> None:
    engine = make(log_stats=True)
    engine.ask("earlier", EARLIER)
    assert engine.run()
    engine.scheduler.kv_cache_manager.make_prefix_cache_stats()
    heard = told(engine, [0])
    engine.send("second", [*EARLIER, *OTHER], None, prompt_logprobs=1)
    engine.scheduler.schedule()
    assert heard == [0]
    assert engine.scheduler.kv_cache_manager.make_prefix_cache_stats().requests == 0


def test_the_state_of_a_shared_beginning_is_kept_for_the_third() -> None:
    engine = make()
    for start, req_id in enumerate(("first", "second", "third")):
        engine.ask(req_id, [*SHARED, *range(500 + 100 * start, 500 + 100 * start + 3 * BLOCK)])
        assert engine.run()
    assert engine.wrong == []
    assert engine.computed["second"] - engine.computed["third"] == len(SHARED)


def test_nobody_elses_junction_counts() -> None:
    """The second shares two blocks, of which no state is kept; the last shares nothing."""
    engine = make()
    engine.ask("earlier", EARLIER)
    assert engine.run()
    engine.ask("second", [*SHARED, *OTHER])
    engine.ask("last", range(900, 900 + 4 * BLOCK))
    decided = engine.advance()
    assert decided is not None
    assert dict(decided.num_scheduled_tokens) == {"second": len(SHARED), "last": 4 * BLOCK}


def test_where_groups_agree_their_hit_is_used() -> None:
    engine = make()
    engine.ask("earlier", EARLIER)
    assert engine.run()
    engine.ask("second", [*EARLIER, *OTHER], max_tokens=1)
    assert engine.run()
    assert engine.wrong == []
    assert engine.computed["second"] == len(OTHER)


def test_what_p_has_is_read_behind_the_blocks_of_attention() -> None:
    engine = make(num_blocks=9)
    connect(engine.worker, "P", num_blocks=64)
    engine.ask("earlier", EARLIER, max_tokens=1)
    assert engine.run()
    engine.ask("other", OTHER)  # takes the last blocks of `earlier`, and leaves its state
    assert engine.run()
    engine.ask("second", range(5 * BLOCK), [[1, 2, 3, 4, 5], [10]])
    pool = engine.scheduler.kv_cache_manager.block_pool
    decided = engine.scheduler.schedule()
    assert not decided.num_scheduled_tokens
    full, state = engine.scheduler.kv_cache_manager.get_block_ids("second")
    cached = [pool.blocks[block].block_hash is not None for block in full]
    assert cached == [True, True, False, False, False]
    assert pool.blocks[state[-1]].block_hash is None


def test_p_keeps_to_what_it_has() -> None:
    engine = make()
    for req_id in ("first", "second"):
        engine.send(req_id, [*EARLIER, *SHARED, 7, 8], {"do_remote_decode": True}, max_tokens=1)
        engine.run(TURNS)
    assert engine.wrong == []
    assert engine.finished["second"] == "length"
    assert engine.computed["second"] == 1


def test_a_prompt_whose_state_d_does_not_load_is_computed() -> None:
    engine = make()
    connect(engine.worker, "P", num_blocks=64)
    engine.ask("earlier", EARLIER)
    assert engine.run()
    engine.ask("second", [*SHARED, 999], remote_blocks=[[1, 2, 3], [4, 5, 6]])
    assert engine.run()
    assert engine.wrong == []
    assert engine.computed["second"] > len(SHARED)


def test_who_goes_on_after_a_preemption_has_what_it_looks_at() -> None:
    engine = make(depth=1, scheduler=Scheduler, num_blocks=13)  # too few for two
    connect(engine.worker, "P", num_blocks=64)
    for start, req_id in enumerate(["older", "newer"]):
        prompt = [start, *EARLIER, *OTHER[:3]]
        engine.ask(req_id, prompt, [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]], max_tokens=BLOCK)
    assert engine.run()
    assert engine.wrong == []


@pytest.mark.skipif(not UNIT, reason="from 0.26.0 on")
@pytest.mark.parametrize("params", [TO_D, None], ids=["p", "d"])
def test_where_nothing_is_loaded_parts_of_blocks_are_used(params: dict[str, Any] | None) -> None:
    engine = engine_of(StateEngine, mode="align", unit=UNIT, prefix_caching=True)
    for req_id, prompt in {"earlier": EARLIER[:26], "second": [*EARLIER[:26], *OTHER]}.items():
        engine.send(req_id, prompt, params, max_tokens=1)
        engine.run(TURNS)
    assert engine.wrong == []
    last = params is TO_D  # which P leaves to D
    assert engine.computed["second"] == 2 + len(OTHER) - last


@pytest.mark.parametrize("params", [TO_D, None], ids=["p", "d"])
@pytest.mark.parametrize(("tokens", "unit"), [(64, None), (64, UNIT), (60, UNIT)])
def test_a_prompt_that_comes_again_has_a_token_left(
    tokens: int, unit: int | None, params: dict[str, Any] | None
) -> None:
    engine = engine_of(StateEngine, mode="align", unit=unit, prefix_caching=True)
    for req_id in ("earlier", "again"):
        engine.send(req_id, EARLIER[:tokens], params, max_tokens=1)
        engine.run(TURNS)
    assert engine.finished["again"] == "length"
    assert engine.wrong == []


@pytest.mark.skipif(not UNIT, reason="from 0.26.0 on")
def test_all_but_the_last_token_may_be_found() -> None:
    engine = engine_of(StateEngine, mode="align", unit=UNIT, prefix_caching=True)
    engine.ask("earlier", EARLIER[:60], max_tokens=1)
    assert engine.run()
    engine.ask("one more", [*EARLIER[:60], 7], max_tokens=1)
    assert engine.run()
    assert engine.wrong == []
    assert engine.computed["one more"] == 1


@pytest.mark.skipif(not UNIT, reason="from 0.26.0 on")
@pytest.mark.parametrize("further", [0, 2 * BLOCK])
def test_where_a_group_has_more_is_where_it_ends(further: int) -> None:
    request = Mock(num_tokens=100, num_preemptions=0)
    coordinator = SimpleNamespace(find_longest_cache_hit=lambda *_: (("agreed",), BLOCK, further))
    manager = SimpleNamespace(
        coordinator=coordinator, log_stats=False, create_kv_cache_blocks=lambda blocks: blocks
    )
    scheduler = SimpleNamespace(kv_cache_manager=manager, _hits_differ=request)
    found = hits.hits_after_load(scheduler, request, 0, ("found",), 3 * BLOCK, 0)
    assert found == (("agreed",), BLOCK, BLOCK + further if further else 0)
    assert hits.hits_after_load(scheduler, request, 8, ("found",), 48, 0) == (("found",), 48, 0)

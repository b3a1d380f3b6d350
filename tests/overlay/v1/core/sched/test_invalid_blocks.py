"""What the scheduler keeps of a request whose KV could not be loaded, for every cache layout."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs
from vllm.v1.request import Request, RequestStatus

from tests.support.decode_engine import DecodeEngine, Step
from tests.support.nixl_worker import GroupKind, connect, nixl_of
from tests.support.release import since

pytest.importorskip("vllm_overlay.v1.core.sched.invalid_blocks", reason="up to 0.29.0")

ASKS_FOR_TOKENS = since("0.19.0")

LAYOUTS: list[tuple[GroupKind, ...]] = [("full",), ("sliding",), ("full", "sliding")]


def lose(engine: DecodeEngine, prompt: range) -> list[Step]:
    """Receive a prompt whose read fails; the steps from then on."""
    connect(engine.worker, "P")
    count = -(-len(prompt) // 16)
    engine.ask("lost", prompt, [list(range(1, count + 1)) for _ in engine.groups])
    steps = [engine.step()]
    nixl_of(engine.worker).fail(*nixl_of(engine.worker).in_flight())
    return [*steps, *(engine.step() for _ in range(5))]


def update(engine: DecodeEngine, request: Request, lost: set[int], **options: bool) -> Any:  # noqa: ANN401
    """Call the scheduler's own; from 0.19.0 on it is told how many tokens are computed now."""
    tokens: Any = ({},) if ASKS_FOR_TOKENS else ()
    own = engine.scheduler._update_requests_with_invalid_blocks
    return own([request], lost, *tokens, **options)


def first_computed(steps: list[Step]) -> dict[str, tuple[int, int]]:
    first: dict[str, tuple[int, int]] = {}
    for step in steps:
        first = step.computed | first
    return first


@pytest.mark.parametrize("groups", LAYOUTS, ids="-".join)
def test_what_was_not_received_is_computed(groups: tuple[GroupKind, ...]) -> None:
    engine = DecodeEngine(groups=groups)
    assert first_computed(lose(engine, range(70)))["lost"] == (0, 70)
    assert engine.scheduler.requests == {}


@pytest.mark.parametrize("groups", LAYOUTS, ids="-".join)
def test_what_was_here_before_is_not_computed_again(groups: tuple[GroupKind, ...]) -> None:
    engine = DecodeEngine(groups=groups)
    engine.ask("before", range(48))
    while engine.scheduler.requests:
        engine.step()
    assert first_computed(lose(engine, range(80)))["lost"] == (48, 80)


@pytest.mark.parametrize("groups", LAYOUTS, ids="-".join)
def test_a_request_that_runs_beside_it_goes_on(groups: tuple[GroupKind, ...]) -> None:
    engine = DecodeEngine(groups=groups)
    engine.ask("beside", range(200, 240), max_tokens=6)
    engine.step()
    computed = [step.computed["beside"] for step in lose(engine, range(70))[:5]]
    assert computed == [(n, n + 1) for n in range(40, 45)]


def test_a_group_of_caches_of_different_sizes_keeps_every_token() -> None:
    """As of DeepSeek-V3.2: latents and what its indexer looks at, with one specification."""
    engine = DecodeEngine(groups=("full",))
    connect(engine.worker, "P")
    engine.ask("a", range(80), [[1, 2, 3, 4, 5]])
    engine.step()
    (group,) = engine.scheduler.kv_cache_config.kv_cache_groups
    one = group.kv_cache_spec
    group.kv_cache_spec = UniformTypeKVCacheSpecs(
        block_size=one.block_size, kv_cache_specs={"latents": one, "index": one}
    )
    request = engine.scheduler.requests["a"]
    (blocks,) = engine.scheduler.kv_cache_manager.get_block_ids("a")
    update(engine, request, {blocks[2]}, evict_blocks=False)
    assert request.num_computed_tokens == 32


@pytest.mark.parametrize("groups", LAYOUTS, ids="-".join)
def test_the_report_of_another_rank_changes_nothing_more(groups: tuple[GroupKind, ...]) -> None:
    engine = DecodeEngine(groups=groups)
    connect(engine.worker, "P")
    engine.ask("a", range(40), [[1, 2, 3] for _ in groups])
    engine.step()
    request = engine.scheduler.requests["a"]
    lost = engine.blocks_of("a")
    assert update(engine, request, lost, evict_blocks=False)[:2] == ({"a"}, 40)
    assert request.num_computed_tokens == 0
    assert update(engine, request, lost, evict_blocks=False)[:2] == (set(), 0)


def test_a_window_is_not_kept_without_what_was_before_it() -> None:
    # Two blocks of window: the first of five blocks are gone when the receive begins.
    engine = DecodeEngine(groups=("sliding",))
    steps = lose(engine, range(80))
    assert first_computed(steps)["lost"] == (0, 80)


def test_a_window_with_all_of_the_prompt_keeps_what_was_before() -> None:
    """As on stock: another connector says which blocks it has not got, and is not asked again."""
    engine = DecodeEngine(groups=("sliding",))
    connect(engine.worker, "P")
    engine.ask("a", range(32), [[1, 2]])
    engine.step()
    request = engine.scheduler.requests["a"]
    [block_ids] = engine.scheduler.kv_cache_manager.get_block_ids("a")
    assert update(engine, request, {block_ids[1]}, evict_blocks=False)[0] == {"a"}
    assert request.num_computed_tokens == 16


def test_loading_while_running_into_several_groups_stays_unsupported() -> None:
    engine = DecodeEngine(groups=("full", "sliding"))
    engine.ask("a", range(40), max_tokens=9)
    engine.step()
    [request] = engine.scheduler.running
    assert request.status == RequestStatus.RUNNING
    assert update(engine, request, {63}) == (set(), 0, set())
    with pytest.raises(ValueError, match="unpack"):
        update(engine, request, engine.blocks_of("a"))


def test_the_null_block_which_all_requests_share_is_no_loss_to_anybody() -> None:
    engine = DecodeEngine(groups=("full", "sliding"))
    connect(engine.worker, "P")
    engine.ask("a", range(80), [[1, 2, 3, 4, 5] for _ in engine.groups])
    engine.step()
    request = engine.scheduler.requests["a"]
    null = engine.scheduler.kv_cache_manager.block_pool.null_block.block_id
    assert null in engine.scheduler.kv_cache_manager.get_block_ids("a")[1]  # before the window
    assert update(engine, request, {null}, evict_blocks=False) == (set(), 0, set())
    assert request.num_computed_tokens == 80

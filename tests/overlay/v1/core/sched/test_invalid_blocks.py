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


def update(
    engine: DecodeEngine, request: Request, lost: set[int], *others: Request, **options: bool
) -> Any:  # noqa: ANN401
    """Call the scheduler's own; from 0.19.0 on it is told how many tokens are computed now."""
    tokens: Any = ({},) if ASKS_FOR_TOKENS else ()
    own = engine.scheduler._update_requests_with_invalid_blocks
    return own([request, *others], lost, *tokens, **options)


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


@pytest.mark.parametrize(("together", "kept"), [(False, 16), (True, 0)])
def test_a_window_with_all_of_the_prompt_keeps_what_was_before(together: bool, kept: int) -> None:
    """As on stock: another connector says which blocks it has not got, and is not asked again.
    Layers that have one specification together may have windows of different sizes."""
    engine = DecodeEngine(groups=("sliding",))
    connect(engine.worker, "P")
    for number, prompt in enumerate((32, 80, 32)):
        engine.ask(str(number), range(100 * number, 100 * number + prompt), [[1, 2, 3, 4, 5]])
    engine.step()
    [group] = engine.scheduler.kv_cache_config.kv_cache_groups
    if together:
        spec = group.kv_cache_spec
        group.kv_cache_spec = UniformTypeKVCacheSpecs(spec.block_size, {"layer": spec})
    requests = list(engine.scheduler.requests.values())
    [block_ids] = engine.scheduler.kv_cache_manager.get_block_ids("0")
    lost = {block_ids[1], *engine.blocks_of("1")}
    affected = update(engine, requests[0], lost, *requests[1:], evict_blocks=False)
    assert affected == ({"0", "1"}, 32 - kept + 80, set())
    assert [request.num_computed_tokens for request in requests] == [kept, 0, 32]


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


def failed(*, by_priority: bool = False) -> DecodeEngine:
    """Of the first two of three prompts that are received nothing came; the second may yet come."""
    engine = DecodeEngine(groups=("full", "sliding"))
    if by_priority:
        engine.serve_by_priority()
    connect(engine.worker, "P")
    requests = engine.scheduler.requests
    for number, name in enumerate(("lost", "loses", "holds")):
        engine.ask(name, range(100 * number, 100 * number + 40), [[1, 2, 3]] * 2)
        requests[name].priority = number
    engine.step()
    for name in ("lost", "loses"):
        update(engine, requests[name], engine.blocks_of(name), evict_blocks=False)
    engine.scheduler.finished_recving_kv_req_ids |= {"lost", "holds"}
    return engine


def waiting(engine: DecodeEngine) -> list[list[str]]:
    """Who waits to be scheduled, and who was skipped, once it has been asked who is next."""
    scheduler = engine.scheduler
    assert scheduler._select_waiting_queue_for_scheduling() is scheduler.skipped_waiting
    queues = scheduler.waiting, scheduler.skipped_waiting
    return [[request.request_id for request in queue] for queue in queues]


@pytest.mark.parametrize("by_priority", [False, True])
def test_who_starts_again_comes_after_who_holds_what_it_received(by_priority: bool) -> None:
    engine = failed(by_priority=by_priority)
    for _ in range(2):
        assert waiting(engine) == [["lost"], ["loses", "holds"]]
        assert engine.blocks_of("lost") == set()
    assert list(engine.step().computed) == ["holds", "lost"]
    assert "loses" not in engine.step().computed
    nixl = nixl_of(engine.worker)
    nixl.finish(*nixl.in_flight())
    assert first_computed([engine.step() for _ in range(3)])["loses"] == (0, 40)


def test_two_that_start_again_let_who_holds_run_also_by_priority() -> None:
    """The more urgent one waits as a preempted one already when the receive of the other ends."""
    engine = failed(by_priority=True)
    assert waiting(engine) == [["lost"], ["loses", "holds"]]
    engine.scheduler.finished_recving_kv_req_ids.add("loses")
    assert waiting(engine) == [["lost", "loses"], ["holds"]]
    assert engine.blocks_of("loses") == set()
    assert list(engine.step().computed) == ["holds", "lost", "loses"]


@pytest.mark.parametrize("since", ["num_preemptions", "num_computed_tokens"])
def test_who_has_run_since_keeps_its_turn(since: str) -> None:
    engine = failed(by_priority=True)
    setattr(engine.scheduler.requests["lost"], since, 1)
    assert waiting(engine) == [[], ["lost", "loses", "holds"]]

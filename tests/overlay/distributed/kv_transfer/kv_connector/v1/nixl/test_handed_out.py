"""Which of a finished request's blocks P names, for every kind of KV-cache group."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.decode_engine import TOKEN
from tests.support.hybrid_engine import states
from tests.support.nixl_release import NixlConnectorScheduler
from tests.support.nixl_worker import make_kv_cache_config
from tests.support.prefill_engine import PrefillEngine

pytest.importorskip(
    "vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.handed_out", reason="up to 0.24.0"
)
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.handed_out import (
    computed_blocks,
    computed_blocks_for_eagle,
)

hooked = sys.modules[NixlConnectorScheduler.__module__]

BLOCKS = [1, 2, 3, 4]
HOOK = next(n for n in ("computed_blocks", "computed_blocks_for_eagle") if hasattr(hooked, n))


def side(*groups: Any, ranks: int = 1, speculative: Any = None) -> Any:  # noqa: ANN401
    """A NIXL scheduler of P."""
    return SimpleNamespace(
        vllm_config=SimpleNamespace(
            parallel_config=SimpleNamespace(
                decode_context_parallel_size=ranks, prefill_context_parallel_size=1
            ),
            speculative_config=speculative,
        ),
        kv_cache_config=make_kv_cache_config(groups),
    )


def named(tokens: int, *groups: Any, ranks: int = 1, blocks: Any = None) -> Any:  # noqa: ANN401
    request: Any = SimpleNamespace(num_computed_tokens=tokens)
    held = tuple(BLOCKS for _ in groups) if blocks is None else blocks
    return computed_blocks(side(*groups, ranks=ranks), request, held)


@pytest.mark.parametrize(
    ("tokens", "expected"), [(1, [1]), (16, [1]), (17, [1, 2]), (64, BLOCKS), (99, BLOCKS)]
)
def test_blocks_with_tokens_are_named(tokens: int, expected: list[int]) -> None:
    assert named(tokens, "full") == (expected,)
    assert named(tokens, "sliding") == (expected,)


@pytest.mark.parametrize(("mode", "expected"), [("all", [1, 2, 3]), ("align", BLOCKS)])
def test_behind_the_last_of_all_states_only_slots_for_guesses(
    mode: str, expected: list[int]
) -> None:
    with states(16, mode=mode, guesses=1):
        assert named(17, "full", "mamba") == ([1, 2], expected)
        assert named(64, "full", "mamba") == (BLOCKS, BLOCKS)


def test_where_nothing_is_said_of_tokens_all_blocks_are_named_as_on_stock() -> None:
    assert named(0, "full", "sliding", "mamba") == (BLOCKS, BLOCKS, BLOCKS)


def test_larger_blocks_hold_more_and_states_are_whole() -> None:
    assert named(33, "full", "wide") == ([1, 2, 3], [1, 2])
    assert named(17, "full", "mamba") == ([1, 2], BLOCKS)


def test_ranks_of_context_parallelism_share_a_block() -> None:
    assert named(33, "full", ranks=2) == ([1, 2],)
    assert named(33, "full", ranks=4) == ([1],)


def test_no_lists_are_no_lists() -> None:
    assert named(17, "full", blocks=()) == ()


@pytest.mark.parametrize(
    ("speculative", "expected"),
    [
        (None, [1, 2]),
        (SimpleNamespace(use_eagle=lambda: True), [1, 2]),
        (SimpleNamespace(use_eagle=lambda: False), BLOCKS),
    ],
    ids=["none", "eagle", "draft model"],
)
def test_a_decode_engine_that_reserves_the_same_slots_has_them_named(
    speculative: Any,  # noqa: ANN401
    expected: list[int],
) -> None:
    request: Any = SimpleNamespace(num_computed_tokens=17)
    found = computed_blocks_for_eagle(side("full", speculative=speculative), request, (BLOCKS,))
    assert found == (expected,)


@pytest.mark.parametrize("when", ["it waits", "it runs", "it was preempted"])
def test_a_request_that_leaves_is_not_handed_out(
    monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """So a scheduler's own never has blocks here without computed tokens."""
    asked: list[Any] = []
    monkeypatch.setattr(hooked, HOOK, lambda _, request, __: asked.append(request))
    engine = PrefillEngine()
    request = engine.prefill("asked", range(40))
    if when != "it waits":
        engine.schedule()
        assert request.num_computed_tokens == 40
    if when == "it was preempted":
        assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    if when != "it runs":
        assert request.num_computed_tokens == 0
        assert engine.blocks_of("asked") == set()
    engine.leave("asked")
    assert asked == []


@pytest.mark.parametrize("length", [1, 15, 16, 17, 29, 30, 32, 33, 46, 48])
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("more", [1, 20])
def test_all_that_was_computed_is_named(length: int, drafts: int, more: int) -> None:
    engine = PrefillEngine(drafts=drafts, step_tokens=24)
    engine.prefill("asked", range(1000, 1000 + length), max_tokens=more)
    engine.run(more + 3)
    computed = [*range(1000, 1000 + length), *(more - 1) * [TOKEN]]
    assert engine.handed_out["asked"][: len(computed)] == computed
    [blocks] = (engine.answers["asked"] or {})["remote_block_ids"]
    assert len(blocks) == -(-len(computed) // 16)


def test_without_guesses_all_blocks_are_named_as_on_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    def answers() -> list[Any]:
        found = []
        for length in range(1, 50):
            engine = PrefillEngine(groups=("full", "sliding"), step_tokens=24)
            engine.prefill("asked", range(length))
            engine.run(4)
            found.append((engine.answers["asked"] or {})["remote_block_ids"])
        return found

    ours = answers()
    monkeypatch.setattr(hooked, HOOK, lambda _, __, block_ids: block_ids)
    assert ours == answers()

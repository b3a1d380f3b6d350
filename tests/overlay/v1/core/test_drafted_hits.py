"""With a draft model all groups hit as long a prefix as counts; else all is as on stock."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from tests.support.decode_engine import DecodeEngine
from tests.support.hybrid_engine import engine_of
from tests.support.overlapped_engine import OverlappedEngine

pytest.importorskip("vllm_overlay.v1.core.drafted_hits", reason="0.20.0 to 0.25.1")

BLOCK = 16
SHARED = [range(1000 * i, 1000 * i + 8 * BLOCK) for i in range(2)]


def engine(*, drafts: bool) -> OverlappedEngine:
    return engine_of(
        OverlappedEngine,
        mode="align",
        guesses=2,
        drafts=drafts,
        prefix_caching=True,
        num_blocks=200,
    )


def found(made: OverlappedEngine, seed: int) -> list[list[int]]:
    """Random prompts that begin like others; of each, how many tokens each group's hit is long, and
    how many count."""
    chance = Random(seed)  # noqa: S311 - repeatable is what it has to be
    lengths = []
    for i in range(12):
        shared = SHARED[chance.randrange(2)][: chance.randrange(6 * BLOCK)]
        own = range(10_000 + 100 * i, 10_000 + 100 * i + chance.randint(1, 40))
        request = made.send(f"r{i}", [*shared, *own], None, max_tokens=1)
        blocks, counted = made.scheduler.kv_cache_manager.get_computed_blocks(request)
        lengths.append([*(len(group) * BLOCK for group in blocks.blocks), counted])
        made.run(20)
    return lengths


@pytest.mark.parametrize("seed", range(5))
def test_no_group_is_ahead_of_another(seed: int) -> None:
    made = engine(drafts=True)
    lengths = found(made, seed)
    assert all(len(set(of_one)) == 1 for of_one in lengths)
    assert any(counted for *_, counted in lengths)
    assert made.wrong == []


def looked_up(coordinator: Any, split: Callable[[Any], None]) -> tuple[object, object]:  # noqa: ANN401
    """The groups of layers, and which of them are looked up further."""
    split(coordinator)
    return coordinator.attention_groups, getattr(coordinator, "eagle_attn_group_indices", None)


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("hybrid", [False, True])
def test_others_are_looked_up_as_on_stock(hybrid: bool, drafts: bool) -> None:
    made = engine(drafts=False) if hybrid else DecodeEngine(groups=("full", "sliding"))
    coordinator: Any = made.scheduler.kv_cache_manager.coordinator
    coordinator.eagle_group_ids = {0, 1} if drafts else set()
    split = type(coordinator).verify_and_split_kv_cache_groups
    same = looked_up(coordinator, split) == looked_up(coordinator, split.__wrapped__)
    assert same is not (hybrid and drafts)

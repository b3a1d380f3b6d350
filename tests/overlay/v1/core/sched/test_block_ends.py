"""Where the parts of a prompt end: as on stock, but for those that begin inside a block."""

from __future__ import annotations

from inspect import signature
from random import Random
from typing import Any

import pytest

from tests.support.decode_engine import DecodeEngine
from tests.support.hybrid_engine import engine_of
from tests.support.release import since

pytest.importorskip("vllm_overlay.v1.core.sched.block_ends", reason="up to 0.26.0")

BLOCK = 16
GUESSES = 3


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_where_parts_end(drafts: bool, seed: int) -> None:
    chance = Random(seed)  # noqa: S311 - repeatable is what it has to be
    made = engine_of(
        DecodeEngine, mode="align", guesses=GUESSES, drafts=drafts, prefix_caching=True
    )
    split: Any = made.scheduler._mamba_block_aligned_split
    stock = split.__func__.__wrapped__
    inside = 0
    for number in range(400):
        length = chance.randint(1, 8 * BLOCK)
        request = made.send(f"r{number}", range(length), None)
        begun = chance.randrange(length + 1)
        whole = begun // BLOCK * BLOCK
        external = begun - whole if since("0.23.0") else 0  # before, stock refuses any
        computed, *cached = chance.choice(((begun, 0, 0), (0, whole, external)))
        request.num_computed_tokens = computed
        start = computed + sum(cached)
        # From 0.25.0 on places for guesses may follow a prompt's last token.
        wanted = chance.randint(1, max(1, length - start, (1 + GUESSES) * (start == length - 1)))
        tokens, plain = (
            split(request, wanted, *cached),
            stock(made.scheduler, request, wanted, *cached),
        )
        if start % BLOCK == 0 or start >= length - 1:
            assert tokens == plain
        else:
            assert tokens == min(plain, BLOCK - start % BLOCK)
            inside += tokens < plain
    # 0.26.0 sees to it itself where there is no draft model.
    assert bool(inside) is (drafts or not since("0.26.0"))


def test_what_is_loaded_may_be_named_as_on_stock() -> None:
    made = engine_of(DecodeEngine, mode="align", guesses=1, drafts=True, prefix_caching=True)
    request = made.send("r", range(4 * BLOCK), None)
    split: Any = made.scheduler._mamba_block_aligned_split
    loaded = {"num_new_local_computed_tokens": BLOCK, "num_external_computed_tokens": 0}
    if "num_uncached_common_prefix_tokens" in signature(split).parameters:  # 0.24.0 to 0.25.1
        loaded["num_uncached_common_prefix_tokens"] = 0
    assert split(request, 2 * BLOCK, **loaded) == split(request, 2 * BLOCK, *loaded.values())


def test_a_prompts_last_token_keeps_its_places_for_guesses() -> None:
    made = engine_of(DecodeEngine, mode="align", guesses=GUESSES, drafts=True, prefix_caching=True)
    for length in range(2 * BLOCK, 3 * BLOCK):
        request = made.send(f"of {length}", range(length), None)
        request.num_computed_tokens = length - 1
        wanted = 1 + GUESSES
        assert made.scheduler._mamba_block_aligned_split(request, wanted) == wanted


def test_the_last_but_one_has_none() -> None:
    made = engine_of(DecodeEngine, mode="align", guesses=1, drafts=True, prefix_caching=True)
    request = made.send("r", range(2 * BLOCK + 1), None)
    request.num_computed_tokens = 2 * BLOCK - 1
    assert made.scheduler._mamba_block_aligned_split(request, 2) == 1

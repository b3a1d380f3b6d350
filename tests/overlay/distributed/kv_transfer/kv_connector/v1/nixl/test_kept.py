"""Of which tokens D, and P, say that there is KV, and which blocks are named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import CrossAttentionSpec

from tests.support.decode_engine import DecodeEngine
from tests.support.hybrid_engine import engine_of
from tests.support.nixl_worker import GroupKind

kept = pytest.importorskip(
    "vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.kept", reason="from 0.21.0 on"
)

BLOCKS = ([1, 2, 3, 4], [5, 6, 7, 8])


def request(computed: int, tokens: int, **params: object) -> Any:  # noqa: ANN401
    return SimpleNamespace(
        request_id="r",
        num_computed_tokens=computed,
        num_tokens=tokens,
        kv_transfer_params=params or None,
    )


def side(*groups: GroupKind, ranks: int = 1, prefill_ranks: int = 1) -> Any:  # noqa: ANN401
    """NIXL's part of a scheduler, with so many context ranks."""
    found = vars(DecodeEngine(groups=groups).scheduler.connector)["connector_scheduler"]
    parallel = found.vllm_config.parallel_config
    parallel.decode_context_parallel_size = ranks
    parallel.prefill_context_parallel_size = prefill_ranks
    return found


@pytest.mark.parametrize(
    ("computed", "tokens", "expected"), [(44, 45, 44), (45, 45, 44), (49, 45, 44), (30, 45, 30)]
)
def test_all_but_the_last_token(computed: int, tokens: int, expected: int) -> None:
    scheduler = side("full")
    assert kept.tokens_kept(scheduler, request(computed, tokens)) == expected
    assert (
        kept.tokens_kept(scheduler, request(computed, tokens, do_remote_prefill=False)) == expected
    )


def test_a_prefill_says_all_that_it_has_computed() -> None:
    of_p = request(49, 45, do_remote_decode=True)
    assert kept.tokens_kept(side("full"), of_p) == 49
    assert kept.blocks_kept(side("full"), of_p, BLOCKS[:1]) == BLOCKS[:1]


@pytest.mark.parametrize(
    ("computed", "tokens", "expected"), [(49, 49, 3), (52, 50, 4), (64, 34, 3), (48, 49, 4)]
)
def test_the_blocks_of_these(computed: int, tokens: int, expected: int) -> None:
    """48 tokens fill three blocks. Where nothing is left out nothing is cut."""
    found = kept.blocks_kept(side("full", "sliding"), request(computed, tokens), BLOCKS)
    assert found == tuple(ids[:expected] for ids in BLOCKS)


def test_ranks_that_share_a_block_hold_as_many_tokens_together() -> None:
    found = kept.blocks_kept(side("full", ranks=2), request(49, 49), ([1, 2],))
    assert found == ([1, 2],)
    assert kept.blocks_kept(side("full", ranks=2), request(33, 33), ([1, 2],)) == ([1],)


def test_with_context_ranks_of_prefills_all_is_said_as_on_stock() -> None:
    """Each has all tokens of a block from 0.26.0 on, and its share before."""
    scheduler, ended = side("full", prefill_ranks=2), request(49, 49)
    assert kept.tokens_kept(scheduler, ended) == 49
    assert kept.blocks_kept(scheduler, ended, BLOCKS[:1]) == BLOCKS[:1]


def test_a_group_that_each_of_them_has_whole() -> None:
    """A draft model's, from 0.30.0 on; it says so of itself."""
    scheduler = side("full", ranks=2)
    [shared] = scheduler.kv_cache_config.kv_cache_groups
    whole = SimpleNamespace(block_size=16, dcp_sharded=False)
    scheduler.kv_cache_config.kv_cache_groups = [shared, SimpleNamespace(kv_cache_spec=whole)]
    found = kept.blocks_kept(scheduler, request(33, 33), BLOCKS)
    assert found == ([1], [5, 6])


def test_what_was_encoded_goes_by_no_tokens() -> None:
    scheduler = side("full")
    [text] = scheduler.kv_cache_config.kv_cache_groups
    spec = CrossAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
    encoded = SimpleNamespace(kv_cache_spec=spec)
    scheduler.kv_cache_config.kv_cache_groups = [text, encoded]
    assert kept.blocks_kept(scheduler, request(33, 33), BLOCKS) == ([1, 2], BLOCKS[1])


def test_states_are_those_after_what_was_computed() -> None:
    """And so is the number of tokens: P goes on from there, and a state has no token twice."""
    hybrid = side("full", "mamba")
    assert kept.tokens_kept(hybrid, request(49, 49)) == 49
    assert kept.blocks_kept(hybrid, request(49, 49), BLOCKS) == BLOCKS


@pytest.mark.parametrize("guesses", [0, 2])
@pytest.mark.parametrize("mode", ["none", "align"])
def test_a_hybrid_that_guesses_keeps_nothing(mode: str, guesses: int) -> None:
    made = engine_of(DecodeEngine, mode=mode, guesses=guesses)
    hybrid = vars(made.scheduler.connector)["connector_scheduler"]
    assert not kept.keeps_nothing(hybrid, request(40, 41, do_remote_decode=True))
    assert not hybrid._reqs_not_processed
    assert kept.keeps_nothing(hybrid, request(40, 41, do_remote_prefill=False)) == bool(guesses)
    assert hybrid._reqs_not_processed == ({"r"} if guesses else set())


@pytest.mark.parametrize("params", [{"do_remote_prefill": False}, {}])
def test_attention_is_kept_whoever_guesses(params: dict[str, object]) -> None:
    scheduler = side("full", "sliding")
    assert not kept.keeps_nothing(scheduler, request(40, 41, **params))
    assert not scheduler._reqs_not_processed


def test_one_that_was_preempted_before_its_last_token_came() -> None:
    scheduler = side("full")
    assert not kept.keeps_nothing(scheduler, request(0, 41, do_remote_prefill=False))
    assert scheduler._reqs_not_processed == {"r"}

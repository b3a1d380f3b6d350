"""K07: without Mamba layers, blocks of different sizes are paired rightly or refused.

Different `--block-size` on P and D gives them different numbers of kernel blocks in a logical
block (the attention kernel's block size is fixed), or kernel blocks of different sizes. Blocks of
one size may still be laid out differently: D permutes them if it was told so.
"""

from __future__ import annotations

import pytest

from tests.support.harness import HarnessError
from tests.support.kv_landing import Deployment, Engines
from tests.support.nixl_worker import (
    EngineDiedError,
    GroupKind,
    MismatchError,
    connect,
    make_worker,
    nixl_of,
)


def faults(
    deployment: Deployment, tokens: int, hit: int = 0, advice: str = "--block-size"
) -> list[str]:
    """What is wrong on D after a transfer; nothing if D refused the peer before any read, and said
    what to start both with."""
    engines = Engines(deployment)
    try:
        engines.connect()
    except HarnessError:
        raise
    except RuntimeError as refusal:
        assert advice in str(refusal)
        assert nixl_of(engines.decode).reads == []
        return []
    try:
        return engines.faults_of_a_prompt(tokens, hit)
    except (AssertionError, EngineDiedError, IndexError, MismatchError) as error:
        return [f"the worker died: {error!r}"]


FAMILIES: list[tuple[tuple[GroupKind, ...], bool]] = [
    (("full",), False),
    (("full", "sliding"), False),
    (("full",), True),  # a latent cache
]


def test_different_ratios_are_refused_or_paired_rightly() -> None:
    wrong = {}
    for prefill, decode in [(1, 2), (2, 1), (2, 4), (4, 2), (2, 3)]:
        for groups, mla in FAMILIES:
            for prefix_caching in (False, True):
                deployment = Deployment(
                    prefill, decode, groups=groups, mla=mla, prefix_caching=prefix_caching
                )
                for tokens in (3, 13, 32, 45):
                    if found := faults(deployment, tokens):
                        wrong[deployment, tokens] = found
    assert wrong == {}


def test_a_prefix_hit_leaves_the_rest_in_its_place_when_kernel_blocks_differ() -> None:
    # P's kernel blocks hold 4 tokens, D's 8.
    deployment = Deployment(1, 1, split=2, prefix_caching=True)
    cases = [(13, 1), (18, 1), (33, 2), (40, 1), (41, 5), (48, 2)]
    wrong = {case: found for case in cases if (found := faults(deployment, *case))}
    assert wrong == {}


def test_a_block_that_is_read_in_parts_is_whole_in_the_end() -> None:
    """P's kernel blocks hold 4 tokens, D's 8. Without a prefix hit every part is paired rightly."""
    wrong = {}
    for mla in (False, True):
        deployment = Deployment(1, 1, split=2, mla=mla, whole=True)
        for tokens in (3, 16, 26, 45):
            if found := faults(deployment, tokens):
                wrong[deployment, tokens] = found
    assert wrong == {}


def test_blocks_of_another_layout_are_permuted_rightly_or_refused() -> None:
    wrong = {}
    for whole in (False, True):
        deployment = Deployment(1, 1, layouts=("HND", "NHD"), whole=whole)
        for tokens in (3, 16, 26):
            if found := faults(deployment, tokens, advice="VLLM_KV_CACHE_LAYOUT"):
                wrong[deployment, tokens] = found
    assert wrong == {}


def test_kernel_blocks_of_different_sizes_are_refused_on_cpus() -> None:
    """Attention on CPUs packs keys by the size of a block: two small ones are no large one."""
    worker = make_worker(block_size=32)
    worker.backend_name = "CPU_ATTN"
    halves = [length // 2 for length in worker.block_len_per_layer]
    blocks = worker.num_blocks * 2
    with pytest.raises(RuntimeError, match="Start prefill and decode with the same --block-size"):
        connect(worker, "P", block_size=16, block_lens=halves, num_blocks=blocks)
    connect(worker, "Q")

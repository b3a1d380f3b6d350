"""What a group's specification says, also where its layers share one."""

from __future__ import annotations

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from vllm_overlay.v1.kv_cache_interface import is_made_of, keeps_all

SHAPE = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
FULL = FullAttentionSpec(**SHAPE)
WINDOW = SlidingWindowSpec(**SHAPE, sliding_window=32)


def together(*specs: KVCacheSpec) -> UniformTypeKVCacheSpecs:
    return UniformTypeKVCacheSpecs(
        block_size=16, kv_cache_specs={str(i): spec for i, spec in enumerate(specs)}
    )


@pytest.mark.parametrize(
    ("spec", "all_kept"),
    [
        (FULL, True),
        (WINDOW, False),
        (together(FULL, FULL), True),
        (together(WINDOW, WINDOW), False),
        (together(FULL, WINDOW), False),
    ],
)
def test_every_layer_counts(spec: KVCacheSpec, all_kept: bool) -> None:
    assert keeps_all(spec) == all_kept
    assert is_made_of(spec, FullAttentionSpec | SlidingWindowSpec)

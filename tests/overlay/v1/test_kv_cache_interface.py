"""What a group's specification says, also where its layers share one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from vllm_overlay.v1.kv_cache_interface import is_made_of, keeps_all, state_specs

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


def test_states_go_by_their_groups() -> None:
    states = MambaSpec(block_size=16, shapes=((1,),), dtypes=(torch.float16,))
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in (FULL, states, WINDOW)]
    config: Any = SimpleNamespace(kv_cache_groups=groups)
    assert state_specs(config) == {1: states}

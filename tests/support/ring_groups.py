"""KV-cache groups that keep one block for a request, whatever its length: from 0.29.0 on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from vllm.v1 import kv_cache_interface
from vllm.v1.kv_cache_interface import KVCacheConfig

from tests.support.nixl_worker import make_kv_cache_config


def has(kind: str) -> bool:
    """Whether the release has a group of this name, such as CircularBufferSpec."""
    return kind in vars(kv_cache_interface)


def kept_in(groups: Sequence[str], *, mla: bool = False) -> KVCacheConfig:
    """A KV-cache configuration as of `make_kv_cache_config`; what ends in Spec is such a group."""
    rings = [kind.endswith("Spec") for kind in groups]
    kinds = ["full" if ring else kind for ring, kind in zip(rings, groups, strict=True)]
    config = make_kv_cache_config(kinds, mla=mla)  # type: ignore[arg-type]
    for ring, kind, group in zip(rings, groups, config.kv_cache_groups, strict=True):
        if ring:
            specification = vars(kv_cache_interface)[kind]
            known = {field.name for field in dataclasses.fields(specification)}
            fields = {"block_size": 8, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
            more = {"head_size_v": 0, "sliding_window": 16}
            given = {name: value for name, value in more.items() if name in known}
            group.kv_cache_spec = specification(**fields, **given)
    return config

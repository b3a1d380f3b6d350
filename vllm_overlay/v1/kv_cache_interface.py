# SPDX-License-Identifier: Apache-2.0
"""All releases: what the specification of a KV-cache group says."""

from __future__ import annotations

from types import UnionType

from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    UniformTypeKVCacheSpecs,
)


def is_made_of(spec: KVCacheSpec, kinds: type | UnionType) -> bool:
    """Whether all layers of a group are of some kinds. They may have one specification together."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return all(is_made_of(one, kinds) for one in spec.kv_cache_specs.values())
    return isinstance(spec, kinds)


def keeps_all(spec: KVCacheSpec) -> bool:
    """Whether a group keeps every token's KV: its blocks are named from the first token on."""
    return is_made_of(spec, FullAttentionSpec)


def state_specs(config: KVCacheConfig) -> dict[int, MambaSpec]:
    """What each KV-cache group of recurrent states keeps, by the group's index."""
    specs = enumerate(group.kv_cache_spec for group in config.kv_cache_groups)
    return {index: spec for index, spec in specs if isinstance(spec, MambaSpec)}

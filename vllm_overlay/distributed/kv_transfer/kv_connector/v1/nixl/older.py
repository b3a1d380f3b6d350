# SPDX-License-Identifier: Apache-2.0
"""All releases: what later releases say of themselves in a field of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec


def pulls(part: Any) -> bool:  # noqa: ANN401 - a scheduler or a worker, of any release
    """Whether a connector's scheduler or worker is one that pulls; up to 0.27.1 its class says it.

    By the name, for upstream's modules import this one.
    """
    mode: str | None = getattr(part, "_TRANSFER_MODE", None)
    if mode is not None:
        return mode == "pull"
    return not any(one.__name__.startswith("NixlPush") for one in type(part).__mro__)


def transfer_group_ids(config: KVCacheConfig) -> Sequence[int]:
    """Return which KV-cache groups are transferred; up to 0.28.0 all of them are."""
    found: Sequence[int] = getattr(config, "transfer_group_ids", range(len(config.kv_cache_groups)))
    return found


def transfer_groups(config: KVCacheConfig) -> list[KVCacheGroupSpec]:
    """Return the KV-cache groups that are transferred, in the order of the block ids."""
    return [config.kv_cache_groups[index] for index in transfer_group_ids(config)]

# SPDX-License-Identifier: Apache-2.0
"""Up to 0.18.1: whether a model keeps recurrent states.

The NIXL scheduler says so itself from 0.19.0 on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_overlay.v1.kv_cache_interface import state_specs

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig


class KnowsMamba:
    """A base for `NixlConnectorScheduler` up to 0.18.1."""

    kv_cache_config: KVCacheConfig

    @property
    def _has_mamba(self) -> bool:
        return bool(state_specs(self.kv_cache_config))

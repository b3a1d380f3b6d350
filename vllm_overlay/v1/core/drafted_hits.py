# SPDX-License-Identifier: Apache-2.0
"""0.20.0 to 0.25.1: with a draft model a hybrid hits no longer a prefix than its attention has.

A draft model goes on from what the model computes for a hit's last tokens, so a hit leaves out its
last block. Each group of layers that it looks at is looked up a block further than the others have,
and drops the last one. Recurrent states drop none: there is one at the end of the hit, or no hit.
Theirs were a block longer than attention's, and its tokens counted as computed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import MambaSpec

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator


def looks_up_states_as_far(
    split: Callable[[HybridKVCacheCoordinator], None],
) -> Callable[[HybridKVCacheCoordinator], None]:
    """Have `verify_and_split_kv_cache_groups` take states for layers that no draft model looks at.

    What is cached goes by the managers, and is as on stock.
    """

    @wraps(split)
    def wrapper(self: HybridKVCacheCoordinator) -> None:
        split(self)
        groups: list[Any] = self.attention_groups
        of_states = {i for i, group in enumerate(groups) if isinstance(group[0], MambaSpec)}
        if hasattr(self, "eagle_attn_group_indices"):  # up to 0.22.1
            self.eagle_attn_group_indices -= of_states
            return
        for i in of_states:
            groups[i] = groups[i]._replace(use_eagle=False)

    return wrapper

# SPDX-License-Identifier: Apache-2.0
"""Up to 0.25.1: a window keeps the blocks that it needs should all guesses in flight be rejected.

With speculative decoding and async scheduling the scheduler decides on a step before it knows how
many guesses of the step before are right. It counts them all, and what a window leaves by that
count is given up. If some are rejected, the next step begins that much earlier, and the oldest
tokens of its window are in blocks that the request no longer has. Upstream counts from 0.26.0 on
what is certain (47728).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.core.single_type_kv_cache_manager import MambaManager

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request


def surely_computed(manager: KVCacheManager, request: Request, computed: int) -> int:
    """How many of `computed` tokens are so whatever is rejected of the steps in flight.

    All of them where nothing is guessed, or no step is in flight. Beside recurrent states also: of
    these upstream keeps the last ones by a count of its own.
    """
    managers = manager.coordinator.single_type_managers
    if not request.spec_token_ids or any(isinstance(one, MambaManager) for one in managers):
        return computed
    # What a step in flight will yield, as far as it is known: one token, and its guesses.
    guesses = max(0, request.num_output_placeholders - 1)
    return max(0, computed - guesses)

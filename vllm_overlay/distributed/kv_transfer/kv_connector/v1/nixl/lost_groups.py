# SPDX-License-Identifier: Apache-2.0
"""From 0.31.0 on: of several KV-cache groups no lost block is named, only the lost request.

A worker names the lost blocks of a failed receive where each group keeps all of a prompt. With
HiSparse there are several of those, and the scheduler takes blocks for those of one group: it ends
the engine. That the request is lost it is told anyhow, and goes by the policy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import (
        NixlBaseConnectorWorker,
    )


def of_one_group(
    lost: Callable[[NixlBaseConnectorWorker], set[int]],
) -> Callable[[NixlBaseConnectorWorker], set[int]]:
    """Have `get_block_ids_with_load_errors` name none where there are several groups."""

    @functools.wraps(lost)
    def wrapper(self: NixlBaseConnectorWorker) -> set[int]:
        blocks = lost(self)  # which also forgets them
        config = vars(self).get("kv_cache_config")  # some of vLLM's own tests give it none
        return blocks if config is None or len(config.kv_cache_groups) == 1 else set()

    return wrapper

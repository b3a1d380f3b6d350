# SPDX-License-Identifier: Apache-2.0
"""0.19.0 to 0.22.1: what NIXL loads beside the steps is not cut at the blocks of states.

Prompts of a model that caches states at the ends of blocks are computed in parts that end there. A
load computes nothing; the release cut it all the same, and took it for an error that it has tokens
of a connector.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.present import (
    loader_of,
    transfers_with_nixl,
)

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request


def is_cut(scheduler: Scheduler, request: Request, loads: bool) -> bool:
    """Whether what a request has in this step has to end with a block.

    Args:
        scheduler: the release's.
        request: that waits.
        loads: it has nothing but a load, which goes on beside the steps. With other connectors
            that is as on stock: whether they load states rightly was never asked there.
    """
    spared = loads and transfers_with_nixl(loader_of(scheduler, request))
    return scheduler.need_mamba_block_aligned_split and not spared

# SPDX-License-Identifier: Apache-2.0
"""Up to 0.22.1: what a connector loads beside the steps is not cut at the blocks of states.

Prompts of a model that caches states at the ends of blocks are computed in parts that end there. A
load computes nothing; the release cut it all the same, and took it for an error that it has tokens
of a connector.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler


def is_cut(scheduler: Scheduler, loads: bool) -> bool:
    """Whether what a request has in this step has to end with a block.

    Args:
        scheduler: the release's.
        loads: it has nothing but a load, which goes on beside the steps.
    """
    return scheduler.need_mamba_block_aligned_split and not loads

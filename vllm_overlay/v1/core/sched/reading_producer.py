# SPDX-License-Identifier: Apache-2.0
"""From 0.24.0 on: a P that reads D's answers back loads into no block that a running step may use.

A step that runs may still write the blocks of a request that ends or is preempted, and what a
connector loads comes in no order with it. So upstream holds such blocks back, but only where the
role is to consume. With `bidirectional_kv_xfer` a P of the role `kv_producer` loads, too: what D
keeps of a conversation's earlier turns.

Such a P frees as on stock, and its loads alone keep off what is in use, as `vllm_overlay`'s block
pool has it up to 0.23.0. Held back from everybody, one block that is missing would preempt every
request that runs, and the prefix cache could not be reset while a step does.

The scheduler of such a P has methods of its own; everybody else's is the class's.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from vllm_overlay.v1.core.block_pool import sparing

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request


def spares_running_steps(scheduler: Scheduler) -> None:
    """From 0.26.0 on: have loads keep off what running steps use, if they are a producer's."""
    if not _loads_in_no_order(scheduler):
        return
    _notes_what_it_frees(scheduler)
    own: Any = scheduler
    decided, ended = own._update_after_schedule, own.update_from_output
    # With asynchronous scheduling one step more runs than there are pipeline stages.
    most = scheduler.parallel_config.pipeline_parallel_size + 1

    def step_begins(*args: object, **named: object) -> object:
        sparing(scheduler.kv_cache_manager.block_pool).step_begins(most)
        return decided(*args, **named)

    def step_ends(*args: object, **named: object) -> object:
        sparing(scheduler.kv_cache_manager.block_pool).step_ends()
        return ended(*args, **named)

    own._update_after_schedule, own.update_from_output = step_begins, step_ends


def spares_what_is_freed(scheduler: Scheduler) -> None:
    """Up to 0.25.1, where 47728 says which steps run: the same of what requests leave."""
    if _loads_in_no_order(scheduler):
        _notes_what_it_frees(scheduler)


def _notes_what_it_frees(scheduler: Any) -> None:  # noqa: ANN401 - its methods are replaced
    free = scheduler._free_request_blocks

    def noting(request: Request) -> object:
        manager = scheduler.kv_cache_manager
        groups = manager.get_blocks(request.request_id).blocks
        sparing(manager.block_pool).notes_freed(itertools.chain.from_iterable(groups))
        return free(request)

    scheduler._free_request_blocks = noting


def _loads_in_no_order(scheduler: Scheduler) -> bool:
    """Whether steps overlap, and upstream does not expect a load."""
    config: Any = scheduler.vllm_config
    return (
        not scheduler.defer_block_free
        and config.max_concurrent_batches > 1
        and _reads_back(config.kv_transfer_config.kv_connector_extra_config)
    )


def _reads_back(extra: Any) -> bool:  # noqa: ANN401 - of the user
    """Whether a connector's own configuration, or that of one it is made of, says so."""
    if not isinstance(extra, dict):
        return False
    if extra.get("bidirectional_kv_xfer", False):
        return True
    parts = extra.get("connectors")  # of a MultiConnector
    return isinstance(parts, list) and any(
        _reads_back(part.get("kv_connector_extra_config"))
        for part in parts
        if isinstance(part, dict)
    )

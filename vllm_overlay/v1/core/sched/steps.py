# SPDX-License-Identifier: Apache-2.0
"""Up to 0.25.1: the scheduler tells its block pool which steps run.

Without a KV connector nothing is loaded, and the pool is told nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_overlay.v1.core.block_pool import sparing

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler


def step_begins(scheduler: Scheduler) -> None:
    """A step was decided on, and the worker is about to get it."""
    if scheduler.connector is not None:
        # As many run as there are pipeline stages, and with async scheduling one more. Who has an
        # `update_from_output` of their own does not say when one ends; here it does all the same.
        most = scheduler.parallel_config.pipeline_parallel_size + 1
        sparing(scheduler.kv_cache_manager.block_pool).step_begins(most)


def step_ends(scheduler: Scheduler) -> None:
    """The output of the oldest step is there: nothing on the device uses its blocks any more."""
    if scheduler.connector is not None:
        sparing(scheduler.kv_cache_manager.block_pool).step_ends()

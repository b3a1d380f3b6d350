# SPDX-License-Identifier: Apache-2.0
"""0.24.0 to 0.29.0: who is short of blocks preempts nobody whose blocks come too late for it.

With a connector that loads KV, the blocks of a request that ends or is preempted are held back
while a step runs that may write to them. To preempt one in flight gains the request that is short
nothing in this step, and the next one just as little: a single block that is missing preempts all
that run. Here the request that is short waits for the running step instead, and nobody who waits
outside takes blocks before it. Upstream (0.30.0) waits, too, for whom it would preempt. It lets
waiting requests in meanwhile, and waits also where the worker forgets who does; and under
`--scheduling-policy priority` it goes on to run one that is to be preempted as long as that needs
no block of its own.
"""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING

from vllm.v1.core.sched.request_queue import SchedulingPolicy

from vllm_overlay.v1.kv_cache_interface import state_specs

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler


def waits_for_running_step(scheduler: Scheduler, scheduled: Container[str]) -> bool:
    """Say whether a running request without blocks is to wait, where it would preempt another.

    It is while blocks are held back, or if those of the next to be preempted would be. Without a
    connector that loads, and without steps that overlap, neither ever is. Where the worker forgets
    who waits, it is as on stock.

    Args:
        scheduler: of the engine.
        scheduled: ids of the requests that this step computes, so far. One of these goes on
            running, step after step, unless it is preempted: so it is.
    """
    scheduler._short_in_step = scheduler.current_step  # type: ignore[attr-defined, unused-ignore]
    if scheduler.policy == SchedulingPolicy.PRIORITY:
        victim = max(
            scheduler.running, key=lambda request: (request.priority, request.arrival_time)
        )
    else:
        victim = scheduler.running[-1]
    if scheduler.sched_step_seq <= scheduler.processed_step_seq:
        return False  # none runs, and blocks are held back for one that may never come
    if _forgets_who_waits(scheduler):
        return False
    waits = bool(scheduler.deferred_frees) or (
        victim.last_sched_seq > scheduler.processed_step_seq and victim.request_id not in scheduled
    )
    if waits and not scheduler.use_v2_model_runner and scheduler.scheduler_config.async_scheduling:
        _pause_without_guesses(scheduler, scheduled)
    return waits


def _pause_without_guesses(scheduler: Scheduler, scheduled: Container[str]) -> None:
    """Have those who pause go on with their token alone, as after a preemption.

    What the scheduler has of their guesses is places. The first model runner fills in those of who
    was in its last step, and of others computes what is no token.
    """
    for request in scheduler.running:
        if request.request_id not in scheduled:
            request.spec_token_ids = []  # the list of places is everybody's


def _forgets_who_waits(scheduler: Scheduler) -> bool:
    """Whether the worker loses what it needs of a request that is left out of a step.

    The first model runner keeps by its rows how many guesses the last step accepted, and so which
    state goes on; and which token was sampled, if the step after the next begins before it ends.
    """
    if scheduler.use_v2_model_runner:
        return False
    states = state_specs(scheduler.kv_cache_config)
    stages = scheduler.parallel_config.pipeline_parallel_size
    return (bool(states) and scheduler.num_spec_tokens > 0) or stages > 2


def nobody_was_short(scheduler: Scheduler) -> bool:
    """Say whether the step that is being decided on may give blocks to waiting requests.

    On stock it may if it has preempted nobody. Who is preempted is so for somebody who is short.
    """
    short_in_step: int | None = vars(scheduler).get("_short_in_step")
    return short_in_step != scheduler.current_step

# SPDX-License-Identifier: Apache-2.0
"""All releases: the scheduler hears of a read over NIXL when it is confirmed, and not before."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from vllm_overlay.distributed.kv_transfer.kv_connector.v1.multi_connector import PassesLooksOn
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.confirmed_reads import (
    ConfirmedReads,
    confirmed_reads,
)
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.connector import WakesIdleEngine

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import ModelRunnerOutput


def hears_of_confirmed(update: Callable[..., Any]) -> Callable[..., Any]:
    """Have `Scheduler.update_from_output` get a report without reads that may have been stale.

    Nothing else is changed in it, and nothing at all for an engine that reads nothing over NIXL.
    """

    @functools.wraps(update)
    def wrapper(
        self: Scheduler, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:  # noqa: ANN401 - as upstream returns it
        for reads in _reads_of(self.connector):
            model_runner_output = reads.settle(self, model_runner_output)
        return update(self, scheduler_output, model_runner_output)

    return wrapper


def _reads_of(connector: object) -> Iterator[ConfirmedReads]:
    among = connector._connectors if isinstance(connector, PassesLooksOn) else (connector,)
    for one in among:
        if isinstance(one, WakesIdleEngine):
            reads = confirmed_reads(one.connector_scheduler)
            if reads is not None:
                yield reads

"""A state engine whose steps know of blocks what the model runner was told.

The scheduler may put another block into its table of a request. The model runner hears only of
those that come behind, until the request is resumed.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput

from tests.support.state_engine import StateEngine


class TableEngine(StateEngine):
    """Each step reads and writes where the model runner's tables say.

    Attributes:
        tables: request id -> its blocks of each group, as the model runner has heard of them.
    """

    def __init__(self, **config: Any) -> None:  # noqa: ANN401 - handed on
        super().__init__(**config)
        self.tables: dict[str, list[list[int]]] = {}

    def _launch(self) -> SchedulerOutput:
        decided = super()._launch()
        tables = self.tables
        for new in decided.scheduled_new_reqs:
            tables[new.req_id] = [list(group) for group in new.block_ids]
        cached = decided.scheduled_cached_reqs
        for req_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if req_id in cached.resumed_req_ids:
                tables[req_id] = [list(group) for group in blocks]
            else:
                for group, more in zip(tables[req_id], blocks or (), strict=False):
                    group += more
        parts = self.steps[-1].parts
        for req_id, part in parts.items():
            parts[req_id] = dataclasses.replace(part, blocks=[list(g) for g in tables[req_id]])
        return decided

"""K34: what a `kv_producer` reads back from D is not overwritten by a step that ran before it came.

Steps overlap, here for there are pipeline stages. P's cache is so small that a second turn, whose
first D keeps, gets the blocks that another request has just left while a step runs for that one.
Before 0.21.0 P computes all of it.
"""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.core.sched.scheduler import Scheduler

from tests.support.nixl_worker import connect
from tests.support.overlapped_engine import OverlappedEngine
from tests.support.release import since
from tests.support.two_way import second_turn, two_way

KEPT = [[10, 11, 12, 13, 14]]
"""D's blocks of the 79 tokens of the first turn."""

PROMPT = range(1000, 1081)

NIXL = {"bidirectional_kv_xfer": True}
PART = {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}
CONFIGURED: dict[str, dict[str, Any]] = {
    "alone": NIXL,
    "of several connectors": {"connectors": [{**PART, "kv_connector_extra_config": NIXL}]},
}


def produces(extra: dict[str, Any]) -> Any:  # noqa: ANN401 - as the engine takes it
    """Return what makes the scheduler of a P whose role is to produce."""

    def make(**how: Any) -> Scheduler:  # noqa: ANN401 - as in the class
        transfer = how["vllm_config"].kv_transfer_config
        own = transfer.kv_connector_extra_config
        transfer.kv_role, transfer.kv_connector_extra_config = "kv_producer", extra
        try:
            return Scheduler(**how)
        finally:
            transfer.kv_connector_extra_config = own

    return make


@pytest.mark.parametrize("configured", CONFIGURED)
@pytest.mark.parametrize("depth", [2, 3])
def test_an_abort_while_its_steps_run(configured: str, depth: int) -> None:
    scheduler = produces(CONFIGURED[configured])
    engine = OverlappedEngine(num_blocks=8, depth=depth, scheduler=scheduler)
    two_way(engine)
    connect(engine.worker, "P", num_blocks=64)
    engine.ask("left", range(40), max_tokens=20)
    engine.advance()
    engine.abort("left")
    engine.send("second", PROMPT, second_turn(KEPT, 79), max_tokens=1)
    for _ in range(20):  # after that P keeps the blocks for D
        engine.advance()
    assert engine.finished["second"] == "length"
    read = engine.computed["second"] <= 2
    assert read is since("0.21.0"), "the prompt was computed, it should be received"
    assert engine.wrong == []

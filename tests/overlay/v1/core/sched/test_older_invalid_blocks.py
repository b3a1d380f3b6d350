"""What is kept of a request whose KV could not be loaded, asked as older schedulers are.

What users see of it is in test_invalid_blocks.py.
"""

from __future__ import annotations

import inspect

import pytest
from vllm.v1.core.sched.scheduler import Scheduler

from tests.support.decode_engine import DecodeEngine
from tests.support.nixl_worker import GroupKind, connect

pytest.importorskip("vllm_overlay.v1.core.sched.older_invalid_blocks", reason="up to 0.18.1")


def test_it_is_not_told_what_was_scheduled() -> None:
    update = Scheduler._update_requests_with_invalid_blocks
    assert "num_scheduled_tokens" not in inspect.signature(update).parameters


@pytest.mark.parametrize("groups", [("full",), ("sliding",), ("full", "sliding")], ids="-".join)
def test_what_was_not_received_is_computed_once(groups: tuple[GroupKind, ...]) -> None:
    engine = DecodeEngine(groups=groups)
    connect(engine.worker, "P")
    engine.ask("a", range(40), [[1, 2, 3] for _ in groups])
    engine.step()
    request = engine.scheduler.requests["a"]
    lost = engine.blocks_of("a")
    update = engine.scheduler._update_requests_with_invalid_blocks
    assert update([request], lost, evict_blocks=False)[:2] == ({"a"}, 40)
    assert request.num_computed_tokens == 0
    assert update([request], lost, evict_blocks=False)[:2] == (set(), 0)

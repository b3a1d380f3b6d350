"""What a plugin that derives from NIXL's classes relies on, as on stock."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.idle_engine import IdleEngine
from tests.support.nixl_worker import connect, make_worker, nixl_of, receive, step
from tests.support.plugins import derive, leave_last_token, read_by_position
from tests.support.serving_app import REMOTE
from vllm_overlay.plugins import is_plugins


@pytest.fixture
def engine() -> IdleEngine:
    made = IdleEngine()
    connect(made.worker, REMOTE["remote_engine_id"])
    return made


@pytest.mark.parametrize(
    ("home", "answer"),
    [("vllm.x", False), ("vllm_overlay.x", False), ("vllm_ascend.x", True), (None, False)],
)
def test_whose_a_thing_is(home: str | None, answer: bool) -> None:
    def method() -> None: ...

    method.__module__ = home  # type: ignore[assignment]
    assert is_plugins(method) is answer
    assert is_plugins(None) is False


def test_reads_may_be_asked_for_by_position() -> None:
    worker: Any = make_worker()
    connect(worker)
    read_by_position(worker)
    receive(worker)
    nixl_of(worker).finish(*nixl_of(worker).in_flight())
    assert step(worker)[1] == {"req-d"}
    assert not worker.get_block_ids_with_load_errors()


@pytest.mark.parametrize("derived", [True, False])
def test_several_requests_may_read_one_lease(engine: IdleEngine, derived: bool) -> None:
    if derived:
        derive(engine.scheduler.connector)
    for number in range(2):  # not the same prompt, or the prefix cache would have it
        offer = {**REMOTE, "remote_block_ids": [[1, 2, 3]]}
        engine.send(f"sample {number}", [number] * 40, offer)
    engine.step()
    assert len(nixl_of(engine.worker).reads) == 1 + derived


@pytest.mark.parametrize("derived", [True, False])
def test_a_prompt_whose_last_token_nobody_sends_is_read(engine: IdleEngine, derived: bool) -> None:
    """Two blocks hold all but the last of its 33 tokens."""
    connector: Any = engine.scheduler.connector
    if derived:
        leave_last_token(connector.connector_scheduler)
    engine.send("req-d", range(33), {**REMOTE, "remote_block_ids": [[1, 2]]})
    computed = engine.step().computed
    assert bool(nixl_of(engine.worker).reads) is derived
    assert bool(computed) is not derived

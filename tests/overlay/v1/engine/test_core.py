"""The engine core's side of a rejection: who may tell P, and that it is told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.core import EngineCore

from tests.support.idle_engine import IdleEngine
from tests.support.nixl_worker import connect, nixl_of
from tests.support.serving_app import REMOTE
from vllm_overlay.v1.engine.core import abort_if_asked
from vllm_overlay.v1.engine.stand_in import make_stand_in, stand_in_id

OFFER = {**REMOTE, "remote_block_ids": [[1]]}
SOURCE = (OFFER["remote_engine_id"], OFFER["remote_request_id"])


@pytest.fixture
def engine() -> Any:  # noqa: ANN401 - stands for an engine core, too
    made = IdleEngine()
    connect(made.worker, OFFER["remote_engine_id"])
    return made


def test_a_request_to_be_aborted_is_so_at_once_and_p_is_told(engine: Any) -> None:  # noqa: ANN401
    engine.add(make_stand_in(stand_in_id("x"), OFFER, None))
    assert engine.scheduler.requests == {}
    assert engine.run()
    assert nixl_of(engine.worker).heard == {"engine-p/0": [b"cmpl-p-0:1"]}
    assert nixl_of(engine.worker).reads == []


def test_any_other_is_not_aborted(engine: Any) -> None:  # noqa: ANN401
    request = make_stand_in("a client's", OFFER, None)
    request.abort_immediately = False
    engine.add(request)
    assert list(engine.scheduler.requests) == ["a client's"]


@pytest.mark.parametrize("asks", [True, False])
def test_who_asks_for_it_is_aborted(asks: bool) -> None:
    """From 0.21.0 on stock does so itself."""
    aborted: list[str] = []
    core: Any = SimpleNamespace(abort_requests=aborted.extend)
    request: Any = SimpleNamespace(request_id="x", abort_immediately=asks)
    abort_if_asked(core, request)
    assert aborted == ["x"] * asks


def test_the_first_claimant_may_and_goes_on_to(engine: Any) -> None:  # noqa: ANN401
    asked = [EngineCore.claim_kv_transfer(engine, *SOURCE, name) for name in ("a", "b", "a")]
    assert asked == [True, False, True]
    assert EngineCore.claim_kv_transfer(engine, SOURCE[0], "another request of P's", "b")


def test_not_what_a_request_is_going_to_read(engine: Any) -> None:  # noqa: ANN401
    request = make_stand_in("reader", OFFER, None)
    request.abort_immediately = False
    engine.add(request)
    assert not EngineCore.claim_kv_transfer(engine, *SOURCE, stand_in_id("x"))


def test_not_with_a_connector_that_is_not_known(engine: Any) -> None:  # noqa: ANN401
    engine.scheduler.connector = None
    assert not EngineCore.claim_kv_transfer(engine, *SOURCE, stand_in_id("x"))

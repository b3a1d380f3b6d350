"""Blocks that several requests name: the first that is added reads them, the others compute."""

from __future__ import annotations

import pytest
from vllm.v1.request import Request

from tests.support.idle_engine import IdleEngine
from tests.support.nixl_worker import connect, nixl_of
from tests.support.serving_app import REMOTE

PROMPT = list(range(40))
OFFER = {**REMOTE, "remote_block_ids": [[1, 2, 3]]}


@pytest.fixture
def engine() -> IdleEngine:
    made = IdleEngine()
    connect(made.worker, OFFER["remote_engine_id"])
    return made


def add(engine: IdleEngine, name: str, **changes: object) -> Request:
    return engine.send(name, PROMPT, {**OFFER, **changes}, max_tokens=1)


def test_one_request_reads(engine: IdleEngine) -> None:
    add(engine, "first")
    second = add(engine, "second")
    computed = engine.step().computed
    assert "first" not in computed, "it awaits what it reads"
    assert computed["second"] == (0, 40)
    assert second.kv_transfer_params is None
    assert len(nixl_of(engine.worker).reads) == 1


def test_blocks_of_two_requests_of_the_peer_s_are_two(engine: IdleEngine) -> None:
    add(engine, "first")
    add(engine, "second", remote_request_id="another", remote_block_ids=[[4, 5, 6]])
    engine.step()
    assert len(nixl_of(engine.worker).reads) == 2


def test_a_request_that_left_has_claimed_them_all_the_same(engine: IdleEngine) -> None:
    """P is told at once that it may free them."""
    add(engine, "left")
    engine.abort("left")
    add(engine, "again")
    assert engine.step().computed["again"] == (0, 40)
    assert engine.run()
    assert nixl_of(engine.worker).reads == []
    assert nixl_of(engine.worker).heard == {"engine-p/0": [b"cmpl-p-0:1"]}

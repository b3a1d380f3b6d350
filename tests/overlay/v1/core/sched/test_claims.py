"""Blocks that several requests name: the first that is added reads them, the others compute.

But where the first could not read them, and ends by that."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.request import Request, RequestStatus

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


def of_policy(policy: Any) -> IdleEngine:  # noqa: ANN401 - of `IdleEngine`
    """An engine with a request `first` that reads three blocks of P's."""
    made = IdleEngine(policy=policy)
    connect(made.worker, OFFER["remote_engine_id"])
    add(made, "first")
    made.step()
    return made


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_what_could_not_be_read_is_for_the_next_where_that_fails_the_first(policy: str) -> None:
    engine = of_policy(policy)
    nixl = nixl_of(engine.worker)
    nixl.fail(*nixl.in_flight())
    ended = {name: why for _ in range(4) for name, why in engine.step().finished.items()}
    assert ended == {"first": "error" if policy == "fail" else "length"}
    connect(engine.worker, OFFER["remote_engine_id"])  # 55471
    add(engine, "again")
    computed = [engine.step().computed for _ in range(2)]
    assert len(nixl.reads) == (2 if policy == "fail" else 1)
    if policy == "recompute":  # P was told that nobody reads it
        assert computed[0]["again"] == (32, 40)
        return
    nixl.finish(*nixl.in_flight())
    assert engine.run()
    assert nixl.heard == {"engine-p/0": [b"cmpl-p-0:1"]}
    add(engine, "third")
    assert engine.step().computed["third"] == (32, 40)


@pytest.mark.parametrize("ids", ["first", ["first", "unknown"], None])
def test_whoever_fails_a_request_that_receives(ids: list[str] | str | None) -> None:
    """By any way in which they can be said; what is said only once is handed on."""
    engine = of_policy("fail")
    said = iter(ids) if isinstance(ids, list) else ids
    engine.scheduler.finish_requests(said, RequestStatus.FINISHED_ERROR)
    assert engine.scheduler.requests["first"].is_finished()  # its blocks are written to
    again = add(engine, "again")
    assert again.kv_transfer_params is not None


@pytest.mark.parametrize("status", [RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR])
def test_who_has_not_begun_or_leaves_keeps_its_claim(
    engine: IdleEngine, status: RequestStatus
) -> None:
    """P hears that the blocks will not be read."""
    add(engine, "first")
    if status is RequestStatus.FINISHED_ABORTED:
        engine.step()
    engine.scheduler.finish_requests("first", status)
    assert add(engine, "again").kv_transfer_params is None

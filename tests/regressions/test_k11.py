"""K11: an engine uses each request's blocks on P once, also when the request is sent again."""

from __future__ import annotations

import time
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from tests.support.idle_engine import IdleEngine
from tests.support.nixl_worker import connect, nixl_of

PROMPT = list(range(40))

OFFER: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[5, 6, 7]],
    "remote_engine_id": "P",
    "remote_request_id": "at-p",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
}


@pytest.fixture
def engine() -> IdleEngine:
    """A decode engine that knows P."""
    engine = IdleEngine()
    connect(engine.worker, "P")
    return engine


def send(engine: IdleEngine, req_id: str, prompt: list[int] = PROMPT) -> None:
    """An API server sends a request whose prompt P has prefilled."""
    params = SamplingParams(
        max_tokens=2, ignore_eos=True, extra_args={"kv_transfer_params": dict(OFFER)}
    )
    params.update_from_generation_config({}, 1)
    engine.add(
        EngineCoreRequest(
            request_id=req_id,
            prompt_token_ids=list(prompt),
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
    )


def served(engine: IdleEngine) -> dict[str, int]:
    """Step until there is nothing to do, with reads that complete; request id -> the tokens of
    its prompt that were computed here."""
    computed: dict[str, int] = {}
    finished: set[str] = set()
    for _ in range(20):
        step = engine.step()
        for req_id, (start, end) in step.computed.items():
            computed[req_id] = computed.get(req_id, 0) + max(0, min(end, len(PROMPT)) - start)
        finished.update(step.finished)
        nixl = nixl_of(engine.worker)
        nixl.finish(*nixl.in_flight())
    assert not engine.scheduler.requests, "the engine does not come to an end"
    assert finished == set(computed)
    return computed


def test_an_aborted_request_that_is_sent_again_is_computed(engine: IdleEngine) -> None:
    send(engine, "left")
    engine.abort("left")
    assert served(engine) == {}
    nixl = nixl_of(engine.worker)
    assert nixl.heard == {"P/0": [b"at-p:1"]}  # from here on P may use the blocks for others
    send(engine, "again")
    assert served(engine) == {"again": len(PROMPT)}
    assert nixl.reads == []
    assert nixl.heard == {"P/0": [b"at-p:1"]}


def test_a_served_request_that_is_sent_again_is_computed(engine: IdleEngine) -> None:
    """Its client has lost the connection in the middle of the answer."""
    send(engine, "first")
    served(engine)
    nixl = nixl_of(engine.worker)
    assert len(nixl.reads) == 1
    assert len(nixl.heard["P/0"]) == 1
    send(engine, "again", PROMPT[:16] + [99] * 24)  # what D has cached of the first does not help
    assert served(engine)["again"] == 24
    assert len(nixl.reads) == 1
    assert len(nixl.heard["P/0"]) == 1


def test_of_two_at_once_the_first_reads(engine: IdleEngine) -> None:
    """A router sends the request once more while the first still waits."""
    send(engine, "first")
    send(engine, "again", [*PROMPT[:-1], 99])
    assert served(engine)["again"] > 0
    nixl = nixl_of(engine.worker)
    assert len(nixl.reads) == 1
    assert len(nixl.heard["P/0"]) == 1

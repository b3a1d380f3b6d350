"""K33: with transfers in both directions D offers P the KV of tokens that it has answered.

Before 0.21.0 D offers none.
"""

from __future__ import annotations

from typing import Any

import pytest
from vllm.utils.math_utils import cdiv
from vllm.v1.outputs import ModelRunnerOutput

from tests.support.decode_engine import TOKEN, DecodeEngine
from tests.support.hybrid_engine import engine_of
from tests.support.nixl_worker import connect, nixl_of
from tests.support.overlapped_engine import STOP, OverlappedEngine
from tests.support.two_way import two_way

BLOCK = 16
BLOCKS = [[40, 41, 42, 43]]
BEHIND = 5
"""What is guessed behind the end of an answer."""


def offers(engine: DecodeEngine) -> dict[str, dict[str, Any]]:
    """What clients are told of each request that has ended, from now on."""
    told: dict[str, dict[str, Any]] = {}
    update = engine.scheduler.update_from_output

    def noting(*args: Any) -> Any:  # noqa: ANN401 - as in the class
        outputs = update(*args)
        for client in outputs.values():
            for output in client.outputs:
                if output.finish_reason is not None:
                    told[output.request_id] = output.kv_transfer_params or {}
        return outputs

    engine.scheduler.update_from_output = noting
    return told


def step(engine: DecodeEngine, sampled: list[int]) -> dict[str, int]:
    """A step in which each request samples these tokens."""
    decided = engine.scheduler.schedule()
    engine._start(decided)
    ids = list(decided.num_scheduled_tokens)
    output = ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={req_id: number for number, req_id in enumerate(ids)},
        sampled_token_ids=[sampled for _ in ids],
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=None,
        kv_connector_output=engine._report(),
    )
    engine.scheduler.update_from_output(decided, output)
    return decided.num_scheduled_tokens


def is_of_the_answer(offer: dict[str, Any], tokens: int) -> bool:
    """Whether the KV is of tokens that P's next prompt has, and the blocks are theirs."""
    kept = offer.get("remote_num_tokens", 0)
    named = offer.get("remote_block_ids") or [[]]
    return kept < tokens and (not kept or [len(ids) for ids in named] == [cdiv(kept, BLOCK)])


@pytest.mark.parametrize("prompt", [40, 45, 46, 47])
def test_what_was_guessed_behind_the_end(prompt: int) -> None:
    """47 tokens fill three blocks with the one that comes first."""
    engine = two_way(DecodeEngine())
    connect(engine.worker, "P", num_blocks=64)
    engine.guess(3, eagle=True)
    told = offers(engine)
    engine.ask("turn-1", range(prompt), BLOCKS, max_tokens=20)
    request = engine.scheduler.requests["turn-1"]
    request.sampling_params.stop_token_ids = [STOP]
    request.sampling_params._all_stop_token_ids = {STOP}
    while not step(engine, [TOKEN]):
        nixl_of(engine.worker).finish(*nixl_of(engine.worker).in_flight())
    request.spec_token_ids = [TOKEN, STOP, BEHIND]
    step(engine, [TOKEN, STOP, BEHIND, BEHIND])
    assert is_of_the_answer(told["turn-1"], request.num_tokens)


@pytest.mark.parametrize("prompt", [40, 43])
def test_the_last_token_of_an_asynchronous_answer(prompt: int) -> None:
    engine = two_way(OverlappedEngine())
    connect(engine.worker, "P", num_blocks=64)
    told = offers(engine)
    engine.ask("turn-1", range(prompt), BLOCKS, max_tokens=20, stops_after=5)
    request = engine.scheduler.requests["turn-1"]
    for _ in range(40):
        engine.advance()
        if told:
            break
    assert is_of_the_answer(told["turn-1"], request.num_tokens)


@pytest.mark.parametrize("right", [1, 2])
def test_the_state_of_a_hybrid_that_guesses(right: int) -> None:
    """A step leaves a state after each token, in a slot each."""
    engine = two_way(engine_of(DecodeEngine, mode="none", guesses=2))
    engine.guess(2)
    told = offers(engine)
    params = {"do_remote_prefill": False, "do_remote_decode": False}
    request = engine.send("turn-1", range(20), params, max_tokens=2 + right)
    step(engine, [TOKEN])
    slots = engine.scheduler.kv_cache_manager.get_block_ids("turn-1")[1]
    request.spec_token_ids = [TOKEN] * 2
    step(engine, [TOKEN] * (1 + right))
    _, named = told["turn-1"].get("remote_block_ids") or ((), ())
    assert list(named) in ([], [slots[right]])

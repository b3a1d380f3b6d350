"""Whose count of cached tokens a client, the other side and the metrics are told."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from vllm.pooling_params import PoolingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.metrics.stats import IterationStats

from tests.support.release import since
from tests.support.serving_app import REMOTE, body, counted, serving
from vllm_overlay.v1.engine.cached_tokens import FIELD, hears_prefills_count

PATH = "/v1/completions"
PROMPT = "a prompt of forty tokens, more or less .."
OWN = len(PROMPT) - 1


async def _sent(params: dict[str, Any] | None) -> EngineCoreRequest:
    async with serving() as server:
        await server.post(PATH, body(PATH, None, prompt=PROMPT))
        request = server.core.requests[0]
    if params is not None:
        assert request.sampling_params is not None
        request.sampling_params.extra_args = {"kv_transfer_params": params}
    return request


def processed(
    params: dict[str, Any] | None, answered: dict[str, Any] | None = None, own: int = OWN
) -> tuple[Any, Any]:
    """The output for a client, and what metrics are told, of a request with such parameters."""
    request = asyncio.run(asyncio.wait_for(_sent(params), 60))
    processor, stats = OutputProcessor(None, log_stats=True), IterationStats()
    processor.add_request(request, None)
    begun = EngineCoreOutput(request.request_id, [4], **counted(own))
    assert processor.process_outputs([begun], 1.0, stats).request_outputs == []
    output = EngineCoreOutput(
        request.request_id,
        [5],
        finish_reason=FinishReason.LENGTH,
        kv_transfer_params=answered,
        **counted(own),
    )
    outputs = processor.process_outputs([output], 1.0, stats).request_outputs
    return outputs[0], stats.finished_requests[0]


@pytest.mark.parametrize("count", [0, 16, OWN])
def test_a_client_hears_of_p_and_the_metrics_of_d(count: int) -> None:
    told, noted = processed(REMOTE | {FIELD: count})
    assert (told.num_cached_tokens, noted.num_cached_tokens) == (count, OWN)


@pytest.mark.parametrize(("own", "count"), [(0, 0), (4, 4), (16, 16), (17, 16)])
def test_nobody_gets_more_cached_than_d_has_not_computed(own: int, count: int) -> None:
    """A client could say so of a prompt that is not transferred, and pay less."""
    told, noted = processed(REMOTE | {FIELD: 16}, own=own)
    assert (told.num_cached_tokens, noted.num_cached_tokens) == (count, own)


@pytest.mark.parametrize("word", [None, -1, len(PROMPT) + 1, True, 16.0, "16", [16]], ids=str)
def test_what_is_no_count_of_the_prompt_is_passed_over(word: object) -> None:
    told, noted = processed(REMOTE | {FIELD: word})
    assert (told.num_cached_tokens, noted.num_cached_tokens) == (OWN, OWN)


@pytest.mark.parametrize(
    "params",
    [
        None,
        REMOTE,
        {"do_remote_decode": True, FIELD: 16},  # a second turn on P, which reads D's blocks
        REMOTE | {"do_remote_prefill": False, FIELD: 16},
        *([] if since("0.31.0") else [{"do_remote_prefill": True, FIELD: 16}]),
    ],
    ids=str,
)
def test_who_reads_nothing_counts_for_itself(params: dict[str, Any] | None) -> None:
    told, noted = processed(params)
    assert (told.num_cached_tokens, noted.num_cached_tokens) == (OWN, OWN)


@pytest.mark.skipif(not since("0.31.0"), reason="earlier ones know no such field")
def test_what_another_connector_says_does_what_it_does_on_stock() -> None:
    told, noted = processed({"do_remote_prefill": True, "transfer_id": "7", FIELD: 16})
    assert (told.num_cached_tokens, noted.num_cached_tokens) == (16, 16)


async def answer(params: dict[str, Any], order: list[int], counts: list[int]) -> dict[str, Any]:
    """What a client gets that asks for a sample for each of `counts`.

    `order` is that in which they end; of the prompt so many tokens were not computed for each.
    """
    async with serving("--enable-prompt-tokens-details") as server:
        server.core.answers = False

        async def ended(_: EngineCoreRequest) -> None:
            asyncio.get_running_loop().call_soon(end)

        def end() -> None:
            if len(server.core.requests) < len(counts):
                return
            for index in order:
                first = index == 0 and params.get("do_remote_decode")
                handed = dict(REMOTE) if first else None
                server.core.finish(server.core.requests[index], None, handed, counts[index])

        server.core.on_add = ended
        asked = body(PATH, params, prompt=PROMPT, n=len(counts), max_tokens=1)
        told: dict[str, Any] = json.loads((await server.post(PATH, asked)).body)
        return told


@pytest.mark.parametrize("order", [[0, 1], [1, 0]], ids=str)
def test_of_several_samples_the_first_one_s_prompt_counts(order: list[int]) -> None:
    """It alone is transferred; the others find in D's, or P's, cache what it left there."""
    at_p = asyncio.run(asyncio.wait_for(answer({"do_remote_decode": True}, order, [8, 32]), 60))
    assert at_p["kv_transfer_params"][FIELD] == 8
    at_d = asyncio.run(asyncio.wait_for(answer(at_p["kv_transfer_params"], order, [OWN, 32]), 60))
    assert at_d["usage"]["prompt_tokens_details"]["cached_tokens"] == 8


@pytest.mark.parametrize("own", [0, 16])
def test_p_hands_over_its_count_as_0_31_0_does(own: int) -> None:
    answered = dict(REMOTE)
    told, _ = processed({"do_remote_decode": True}, answered, own=own)
    assert told.kv_transfer_params == REMOTE | {"remote_prefill_cached_tokens": own}
    assert answered == REMOTE, "what the engine core said is its own"


def test_what_is_pooled_is_counted_as_on_stock() -> None:
    request = msgspec.structs.replace(
        asyncio.run(asyncio.wait_for(_sent(None), 60)),
        sampling_params=None,
        pooling_params=PoolingParams(task="embed"),
    )
    processor = OutputProcessor(None, log_stats=False)
    processor.add_request(request, None)
    pooled = EngineCoreOutput(
        request.request_id,
        [],
        pooling_output=torch.zeros(1),
        finish_reason=FinishReason.STOP,
        **counted(OWN),
    )
    told = processor.process_outputs([pooled]).request_outputs[0]
    assert told.num_cached_tokens == OWN


def test_a_count_that_is_there_stays() -> None:
    told, _ = processed({"do_remote_decode": True}, REMOTE | {FIELD: 3}, own=16)
    assert told.kv_transfer_params == REMOTE | {FIELD: 3}


@pytest.mark.parametrize(
    "answered",
    [
        REMOTE | {"do_remote_prefill": False},
        {name: REMOTE[name] for name in REMOTE if name != "remote_request_id"},
        {"do_remote_prefill": True, "transfer_id": "of another connector"},
    ],
    ids=str,
)
def test_other_answers_are_handed_on_as_they_are(answered: dict[str, Any]) -> None:
    told, _ = processed({"do_remote_decode": True}, dict(answered), own=16)
    assert told.kv_transfer_params == answered


@pytest.mark.parametrize(
    ("params", "reports"),
    [
        (None, False),
        ({"of": "another connector"}, False),
        ({"do_remote_prefill": True, "transfer_id": "of another connector"}, False),
        ({"do_remote_decode": True}, True),
        (REMOTE, True),
    ],
    ids=str,
)
def test_a_request_that_nixl_does_not_transfer_has_stocks_own_method(
    params: dict[str, Any] | None, reports: bool
) -> None:
    """It is called for each token. No state waits for the garbage collector, with its prompt."""
    request = asyncio.run(asyncio.wait_for(_sent(params), 60))
    processor = OutputProcessor(None, log_stats=False)
    processor.add_request(request, None)
    [state] = processor.request_states.values()
    assert ("make_request_output" in vars(state)) is reports
    gone = weakref.ref(state)
    del state
    gc.disable()
    try:
        processor.abort_requests([request.request_id], internal=True)
        assert gone() is None
    finally:
        gc.enable()


def test_so_has_each_of_several_samples() -> None:
    state, request = SimpleNamespace(parent_req=SimpleNamespace()), SimpleNamespace()
    request.sampling_params = None
    hears_prefills_count(lambda *_: state)(None, None, request)
    assert "make_request_output" not in vars(state)

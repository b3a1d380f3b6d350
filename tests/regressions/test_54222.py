"""54222: `cached_tokens` of an answer are what P had in its cache, not what D received."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.metrics.stats import FinishedRequestStats, IterationStats

from tests.support.release import since
from tests.support.serving_app import ENDPOINTS, REMOTE, body, counted, serving

COMPLETIONS, CHAT, *_ = ENDPOINTS
PROMPT = "forty tokens, of which P has sixteen in ."
FIELD = "remote_prefill_cached_tokens"
IN_PREFILLS_CACHE, RECEIVED = 16, len(PROMPT) - 1


async def answer(path: str, params: dict[str, Any], cached: int, **changes: object) -> bytes:
    """The body of an answer to a request of which so many tokens were not computed."""
    async with serving("--enable-prompt-tokens-details") as server:
        server.core.answers = False
        handed = dict(REMOTE) if params.get("do_remote_decode") else None

        async def finish(request: EngineCoreRequest) -> None:
            loop = asyncio.get_running_loop()
            loop.call_soon(lambda: server.core.finish(request, None, handed, cached))

        server.core.on_add = finish
        said = [{"role": "user", "content": PROMPT}]
        prompt = {"messages": said} if path == CHAT else {"prompt": PROMPT}
        return (await server.post(path, body(path, params, max_tokens=1, **prompt, **changes))).body


async def usage(path: str, stream: bool) -> dict[str, Any]:
    """What D's client is told, after a router went to P and handed on what P answered."""
    at_p = json.loads(await answer(path, {"do_remote_decode": True}, IN_PREFILLS_CACHE))
    changes = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    at_d = await answer(path, at_p["kv_transfer_params"], RECEIVED, **changes)
    events = [line.removeprefix(b"data: ") for line in at_d.splitlines() if line]
    told: dict[str, Any] = json.loads(events[-2] if stream else at_d)["usage"]
    return told


async def sent_to_core(params: dict[str, Any]) -> EngineCoreRequest:
    """D's request, as its engine core gets it."""
    async with serving() as server:
        await server.post(COMPLETIONS, body(COMPLETIONS, params, prompt=PROMPT))
        return server.core.requests[0]


def finished_at_d(params: dict[str, Any]) -> FinishedRequestStats:
    """What D's metrics are told of a request that has received its prompt."""
    request = asyncio.run(asyncio.wait_for(sent_to_core(params), 60))
    processor, stats = OutputProcessor(None, log_stats=True), IterationStats()
    processor.add_request(request, None)
    ended = {"finish_reason": FinishReason.LENGTH, **counted(RECEIVED)}
    processor.process_outputs([EngineCoreOutput(request.request_id, [5], **ended)], 1.0, stats)
    return stats.finished_requests[0]


if not since("0.31.0"):

    @pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
    @pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
    def test_a_client_of_d_hears_of_p_s_cache(path: str, stream: bool) -> None:
        told = asyncio.run(asyncio.wait_for(usage(path, stream), 60))
        assert told["prompt_tokens_details"]["cached_tokens"] == IN_PREFILLS_CACHE

else:

    def test_what_d_received_is_not_counted_as_computed() -> None:
        """`vllm:request_prefill_kv_computed_tokens` is the prompt without what this says."""
        assert finished_at_d(REMOTE | {FIELD: IN_PREFILLS_CACHE}).num_cached_tokens == RECEIVED

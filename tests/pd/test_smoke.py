"""Requests go P -> D over NIXL and give the tokens of a server without P/D."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice

import openai
import pytest

from tests.pd.client import REMOTE_DECODE
from tests.pd.deployment import TOKENS, Deployment, Note, Plain


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_eight_prompts_give_the_tokens_of_a_plain_server(
    stream: bool, pd: Deployment, plain: Plain, prompts: Iterator[str], note: Note
) -> None:
    moved = pd.d.metric("nixl_bytes_transferred_sum")
    with (
        openai.OpenAI(base_url=f"{pd.p.url}/v1", api_key="-", max_retries=0) as at_p,
        openai.OpenAI(base_url=f"{pd.d.url}/v1", api_key="-", max_retries=0) as at_d,
    ):
        for prompt in islice(prompts, 8):
            asked = {"ignore_eos": True, "return_token_ids": True}
            first = at_p.completions.create(
                model="m",
                prompt=prompt,
                max_tokens=1,
                temperature=0,
                extra_body={**asked, "kv_transfer_params": REMOTE_DECODE},
            )
            params = first.model_extra["kv_transfer_params"]
            answer = at_d.completions.create(
                model="m",
                prompt=prompt,
                max_tokens=TOKENS,
                temperature=0,
                stream=stream,
                extra_body={**asked, "kv_transfer_params": params},
            )
            chunks = list(answer) if stream else [answer]
            tokens = [
                token
                for chunk in chunks
                for choice in chunk.choices
                for token in choice.model_extra["token_ids"]
            ]
            assert tokens == plain[prompt]
    moved = pd.d.metric("nixl_bytes_transferred_sum") - moved
    note(bytes_moved=moved)
    assert moved > 0
    released = pd.released()
    note(released_s=released)
    assert released is not None


@pytest.mark.shows("42644")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_token_ids_with_parameters_of_their_own(
    stream: bool, pd: Deployment, plain: Plain, prompts: Iterator[str], note: Note
) -> None:
    """The parameters stand in the request's field, where the other endpoints have theirs."""
    endpoint = "/inference/v1/generate"
    prompt = next(prompts)
    ids = pd.p.post("/tokenize", {"model": "m", "prompt": prompt}).raise_for_status().json()
    asked = {"model": "m", "token_ids": ids["tokens"]}
    greedy = {"temperature": 0.0, "ignore_eos": True}
    to_p = {**asked, "sampling_params": {**greedy, "max_tokens": 1}}
    kept = pd.p.post(endpoint, {**to_p, "kv_transfer_params": REMOTE_DECODE}).raise_for_status()
    params = kept.json()["kv_transfer_params"]
    assert params is not None, "P keeps nothing"
    moved = pd.d.metric("nixl_bytes_transferred_sum")
    to_d = {**asked, "stream": stream, "sampling_params": {**greedy, "max_tokens": TOKENS}}
    answer = pd.d.post(endpoint, {**to_d, "kv_transfer_params": params}).raise_for_status()
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines()]
    chunks = [json.loads(line) for line in lines if line.startswith("{")]
    tokens = [t for chunk in chunks for choice in chunk["choices"] for t in choice["token_ids"]]
    assert tokens == plain[prompt]
    moved = pd.d.metric("nixl_bytes_transferred_sum") - moved
    note(bytes_moved=moved)
    assert moved > 0
    assert pd.released() is not None

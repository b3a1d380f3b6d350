"""41269, K05, K04: what D refuses for good after P has prefilled it, P has back at once.

The tests speak the protocol to P and D themselves: a router between them sends P a request of its
own making, and hides most of what is refused here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.pd.client import Params, body, leave, prefill, to_rank, tokens_of
from tests.pd.deployment import PROMPT_BLOCKS, TOKENS, Deployment, Note, Plain
from tests.pd.model import CONTEXT

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
GENERATE = "/inference/v1/generate"

LONG = "x" * (CONTEXT + 1)
Changes = dict[str, Any]

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}

SAMPLING: dict[str, Changes] = {
    "max_tokens": {"max_tokens": CONTEXT + 1},
    "temperature": {"temperature": -1.0},
    "top_p": {"top_p": 2.0},
    "min_tokens": {"min_tokens": 99},
    "stop": {"stop": [""]},
    "logit_bias": {"logit_bias": {"999999": 1.0}},
    "presence_penalty": {"presence_penalty": 9.0},
    "regex": {"structured_outputs": {"regex": "(("}},
    "grammar": {"structured_outputs": {"grammar": "root ::= ("}},
}
TEXT: dict[str, Changes] = {
    **SAMPLING,
    "model": {"model": "no-such-model"},
    "schema": {"structured_outputs": {"json": {"type": "no-such-type"}}},
    "body": {"model": 7},
    "field": {"max_tokens": "many"},
}
REJECTIONS: dict[str, dict[str, Changes]] = {
    COMPLETIONS: {
        **TEXT,
        "n": {"n": 0},
        "prompt": {"prompt": LONG},
        "token ids": {"prompt": [10**6]},
        "logprobs": {"logprobs": 999},
    },
    CHAT: {
        **TEXT,
        "prompt": {"messages": [{"role": "user", "content": LONG}]},
        "messages": {"messages": "no list"},
        "tool_choice": {"tools": [TOOL], "tool_choice": "auto"},  # without a parser
        "top_logprobs": {"logprobs": True, "top_logprobs": 999},
    },
    GENERATE: {
        "model": {"model": "no-such-model"},
        "body": {"model": 7},
        "prompt": {"token_ids": [1] * (CONTEXT + 1)},
        "token ids": {"token_ids": [-1]},
        **{name: {"sampling_params": {"max_tokens": 4, **SAMPLING[name]}} for name in ("top_p",)},
        "field": {"sampling_params": {"max_tokens": "many"}},
    },
}
STREAMED = ("model", "body", "prompt", "logit_bias", "regex", "max_tokens", "token ids", "top_p")


def asked_at(endpoint: str, prompt: str, params: object, changes: Changes) -> dict[str, Any]:
    """A good request with some fields changed."""
    if endpoint == GENERATE:
        sampling = {"max_tokens": 4, "temperature": 0.0}
        asked = {"model": "m", "token_ids": [1, 2, 3], "sampling_params": sampling, **changes}
        extra = {"extra_args": {"kv_transfer_params": params}}
        return {**asked, "sampling_params": {**asked["sampling_params"], **extra}}
    good = body(prompt, 4, kv_transfer_params=params)
    if endpoint == CHAT:
        del good["prompt"]
        good["messages"] = [{"role": "user", "content": prompt}]
    return {**good, **changes}


def is_refused(status: int, text: str) -> bool:
    """Whether the answer is an error, be it one that a stream says after its 200."""
    return status >= 400 or '"error"' in text


@pytest.mark.shows("41269", "K05")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("endpoint", REJECTIONS)
def test_a_rejection_frees_the_blocks_of_p(
    endpoint: str, stream: bool, pd: Deployment, prompts: Iterator[str], note: Note
) -> None:
    kept: dict[str, int] = {}
    slowest = 0.0
    names = [name for name in REJECTIONS[endpoint] if not stream or name in STREAMED]
    for name in names:
        before = pd.p.blocks_held()
        prompt = next(prompts)
        changes = {**REJECTIONS[endpoint][name], "stream": stream}
        asked = asked_at(endpoint, prompt, prefill(pd.p, prompt), changes)
        answer = pd.d.post(endpoint, asked)
        assert is_refused(answer.status_code, answer.text), f"{name} was served: {answer.text}"
        released = pd.released(down_to=before)
        if released is None:
            kept[name] = pd.p.blocks_held() - before
        else:
            slowest = max(slowest, released)
    note(rejected=len(names), slowest_release_s=round(slowest, 3), kept=kept)
    assert not kept, f"P keeps the blocks of {len(kept)} of {len(names)} rejected requests"
    assert pd.p.healthy and pd.d.healthy


@pytest.mark.shows("K05")
def test_a_rank_that_does_not_exist_frees_the_blocks_of_p(
    pd: Deployment, prompts: Iterator[str], note: Note
) -> None:
    prompt = next(prompts)
    asked = asked_at(COMPLETIONS, prompt, prefill(pd.p, prompt), {})
    answer = pd.d.post(COMPLETIONS, asked, headers=to_rank(7))
    assert is_refused(answer.status_code, answer.text)
    released = pd.released()
    note(released_s=released)
    assert released is not None


def test_clients_that_leave_and_come_back(
    pd: Deployment, prompts: Iterator[str], plain: Plain, note: Note
) -> None:
    """At once, before anything of the answer, and in the middle of it; then the same again."""
    left = 0
    for stream in (False, True):
        for delay in (0.0, 0.001, 0.003, 0.01, 0.03, 0.1, None):
            prompt = next(prompts)
            params = prefill(pd.p, prompt)
            leave(pd.d.port, body(prompt, 400, kv_transfer_params=params, stream=stream), delay)
            answer = pd.d.post(COMPLETIONS, body(prompt, TOKENS, kv_transfer_params=params))
            assert answer.status_code == 200, answer.text
            assert tokens_of(answer.json()) == [plain[prompt]], f"after {delay} s"
            left += 1
    released = pd.released()
    note(clients=left, released_s=released, kept=pd.p.blocks_held())
    assert pd.p.healthy and pd.d.healthy


_OTHERS = list(range(3, PROMPT_BLOCKS + 1))
# What a client may make of the parameters that P gave it: (changes, whether P is still named).
MALFORMED: dict[str, tuple[Changes, bool]] = {
    "no remote_block_ids": ({"remote_block_ids": None}, True),
    "empty remote_block_ids": ({"remote_block_ids": []}, True),
    "too many groups": ({"remote_block_ids": [[1, 2, 3], [1, 2, 3]]}, True),
    "too few blocks": ({"remote_block_ids": [[1]]}, True),
    "negative block": ({"remote_block_ids": [[1, -2, *_OTHERS]]}, True),
    "huge block": ({"remote_block_ids": [[1, 2**63, *_OTHERS]]}, True),
    "block beyond P's": ({"remote_block_ids": [[9999, 2, *_OTHERS]]}, True),
    "block of another type": ({"remote_block_ids": [[1, "2", *_OTHERS]]}, True),
    "blocks of another type": ({"remote_block_ids": {"0": [1, 2, 3]}}, True),
    "no remote_engine_id": ({"remote_engine_id": None}, False),
    "no remote_request_id": ({"remote_request_id": None}, False),
    "no remote_host": ({"remote_host": None}, False),
    "no remote_port": ({"remote_port": None}, False),
    "remote_engine_id of another type": ({"remote_engine_id": ["P"]}, False),
    "remote_request_id that is half a character": ({"remote_request_id": "\ud800"}, False),
    "remote_host of another type": ({"remote_host": 7}, False),
    "remote_port of another type": ({"remote_port": "5600"}, False),
    "huge remote_port": ({"remote_port": 10**30}, False),
    "negative tp_size": ({"tp_size": -1}, False),
    "huge tp_size": ({"tp_size": 10**9}, False),
}


@pytest.mark.shows("K04")
def test_malformed_parameters_harm_nobody(
    pd: Deployment, prompts: Iterator[str], plain: Plain, note: Note
) -> None:
    """A clear 400 or an answer that D computed itself; both servers live; P holds nothing."""
    answers: dict[str, int] = {}
    slowest = 0.0
    for name, (changes, owner_is_known) in MALFORMED.items():
        prompt = next(prompts)
        good = prefill(pd.p, prompt)
        params: Params = {k: v for k, v in {**good, **changes}.items() if v is not None}
        answer = pd.d.post(COMPLETIONS, body(prompt, 12, kv_transfer_params=params))
        assert pd.d.healthy, f"D is gone after {name}: {answer.status_code}"
        answers[name] = answer.status_code
        if answer.status_code == 200:
            assert answer.json()["choices"][0]["token_ids"] == plain[prompt], name
        else:
            assert answer.status_code == 400 and "kv_transfer_params" in answer.text, name
        if not owner_is_known:  # nobody could tell P; its client does
            pd.d.post(COMPLETIONS, body(prompt, 1, kv_transfer_params=good)).raise_for_status()
        released = pd.released()
        assert released is not None, f"P keeps its blocks after {name}"
        slowest = max(slowest, released)
    note(sent=len(MALFORMED), slowest_release_s=round(slowest, 3), answers=answers)
    assert pd.p.healthy

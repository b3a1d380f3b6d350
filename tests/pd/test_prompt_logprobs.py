"""K16: what D says of each prompt token is what it computed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.pd.client import body, prefill
from tests.pd.deployment import TOKENS, Deployment, Note


def said_of_prompt(answer: dict[str, Any]) -> list[list[tuple[str, float]]]:
    """Return, for each token of a completion's prompt but the first, its likeliest tokens."""
    (choice,) = answer["choices"]
    return [
        sorted((token, round(said["logprob"], 3)) for token, said in of_token.items())
        for of_token in choice["prompt_logprobs"][1:]
    ]


@pytest.mark.shows("K16")
def test_prompt_logprobs_are_those_of_the_prompt(
    pd: Deployment, prompts: Iterator[str], note: Note
) -> None:
    prompt = next(prompts)
    params = prefill(pd.p, prompt)
    asked = body(prompt, TOKENS, prompt_logprobs=1)
    answer = pd.d.post("/v1/completions", {**asked, "kv_transfer_params": params})
    served = answer.status_code == 200
    released = pd.released() if served else None
    note(served=served, released_s=released)
    assert served, f"D answers {answer.status_code}: {answer.text[:200]}"
    alone = pd.d.post("/v1/completions", asked).raise_for_status().json()
    wrong = sum(
        one != other
        for one, other in zip(said_of_prompt(answer.json()), said_of_prompt(alone), strict=True)
    )
    note(wrong=wrong)
    assert not wrong, f"{wrong} tokens of the prompt have other log-probabilities than without P"
    assert released is not None

"""K10: one prefill on P, several requests on D: right tokens for all, and P is told once."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import pytest

from tests.pd.client import body, prefill, tokens_of
from tests.pd.deployment import PROMPT_BLOCKS, TOKENS, Deployment, Note, Plain
from tests.pd.server import BLOCKS

LONG = 200  # so that P overwrites what it freed before the first choice ends
LONGER = 340  # the most that leaves room in D's cache for all


@pytest.mark.parametrize("n", [2, 4])
def test_every_choice_of_a_prompt(
    n: int, pd: Deployment, plain: Plain, prompts: Iterator[str], note: Note
) -> None:
    """D is busy, and so is P: blocks that it has freed are soon another's.

    Right on stock as well: D starts the reads of all choices in one step, before P has heard of
    the first one's end. tests/regressions/test_k10.py shows what happens when it has.
    """
    prompt = next(prompts)
    params = prefill(pd.p, prompt)
    others = list(islice(prompts, 7))
    with ThreadPoolExecutor(9) as pool:
        for other in others:  # D computes eight sequences at a time
            pool.submit(pd.d.post, "/v1/completions", body(other, LONGER))
        # Several choices at temperature 0 are refused; the likeliest token of one is the same.
        greedy = {"temperature": 1.0, "top_k": 1}
        asked = body(prompt, LONG, n=n, kv_transfer_params=params, **greedy)
        answer = pool.submit(pd.d.post, "/v1/completions", asked)
        overwrite(pd, prompts)
        choices = tokens_of(answer.result().raise_for_status().json())
    wrong = sum(tokens[:TOKENS] != plain[prompt] for tokens in choices)
    released = pd.released()
    note(choices=n, wrong=wrong, released_s=released)
    assert len(choices) == n
    assert not wrong, f"{wrong} of {n} choices have other tokens than a plain server"
    assert released is not None


def overwrite(pd: Deployment, prompts: Iterator[str]) -> None:
    """Have P compute more than its cache holds, for nobody."""
    for _ in range(-(-BLOCKS // PROMPT_BLOCKS)):
        pd.p.post("/v1/completions", body(next(prompts), 1)).raise_for_status()


@pytest.mark.shows("K10")
def test_two_prompts_in_one_request(
    pd: Deployment, plain: Plain, prompts: Iterator[str], note: Note
) -> None:
    """P answers for one of them only; D must not take its KV for the other's."""
    pair = list(islice(prompts, 2))
    params = prefill(pd.p, pair)
    answer = pd.d.post("/v1/completions", body(pair, TOKENS, kv_transfer_params=params))
    assert answer.status_code == 200, answer.text
    wrong = sum(t != plain[p] for t, p in zip(tokens_of(answer.json()), pair, strict=True))
    released = pd.released()
    note(wrong=wrong, released_s=released)
    assert not wrong, f"{wrong} of 2 prompts have other tokens than on a plain server"
    assert released is not None

"""How long D takes from a request to its first token, where P has the prompt; for the report.

What a fix adds to each read shows here, stock against patched.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from itertools import islice

from tests.pd.client import body, first_token, prefill
from tests.pd.deployment import Deployment, Note, Plain

REQUESTS = 100
FIRST = 8
"""Requests before those that are measured: the handshake, and what an engine does once."""


def test_the_first_token_of_a_prompt_that_p_has_computed(
    pd: Deployment, prompts: Iterator[str], plain: Plain, note: Note
) -> None:
    seconds = []
    for prompt in islice(prompts, FIRST + REQUESTS):
        asked = body(prompt, 1, kv_transfer_params=prefill(pd.p, prompt))
        took, token = first_token(pd.d, asked)
        assert token == plain[prompt][0]
        seconds.append(took)
    ordered = sorted(1000 * took for took in seconds[FIRST:])
    note(
        requests=REQUESTS,
        first_token_ms_median=round(statistics.median(ordered), 1),
        first_token_ms_90=round(ordered[REQUESTS * 9 // 10], 1),
        first_token_ms_longest=round(ordered[-1], 1),
    )

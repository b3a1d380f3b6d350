"""K07: one engine of a deployment was started with another --block-size.

D has to give the tokens of a plain server all the same: it pairs the blocks rightly, or refuses P
and computes the prompt itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import pytest

from tests.pd.client import body, prefill, tokens_of
from tests.pd.deployment import TOKENS, Deployment, Plain, Start
from tests.pd.server import BLOCK, BLOCKS, Server


@pytest.mark.shows("K07")
def test_tokens_with_two_block_sizes(
    pd: Deployment, start: Start, plain: Plain, prompts: Iterator[str]
) -> None:
    sizes = ["--block-size", str(2 * BLOCK), "--num-gpu-blocks-override", str(BLOCKS // 2)]
    large = start("large-blocks", transfer={}, arguments=sizes, core=1).wait_ready()
    assert wrong(pd.p, large, plain, islice(prompts, 4)) == {}
    assert wrong(large, pd.d, plain, islice(prompts, 4)) == {}


def wrong(p: Server, d: Server, plain: Plain, prompts: Iterator[str]) -> dict[str, object]:
    """Return what D made of those of `prompts` that it did not answer as a plain server."""
    found: dict[str, object] = {}
    for prompt in prompts:
        asked = body(prompt, TOKENS, kv_transfer_params=prefill(p, prompt))
        answer = d.post("/v1/completions", asked)
        tokens = tokens_of(answer.json())[0] if answer.status_code == 200 else answer.text
        if tokens != plain[prompt]:
            found[prompt] = tokens
    return found

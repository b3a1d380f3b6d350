"""The KV cache is too small for what is asked: requests are preempted, and answered rightly."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

from tests.pd.client import body, prefill, tokens_of
from tests.pd.deployment import PROMPT_BLOCKS, Deployment, Note, Start
from tests.support.harness import HarnessError

AT_ONCE = 8
LONG = 200
"""Tokens of an answer, for which a request takes twice the blocks of its prompt and more."""


def test_a_d_that_preempts_what_it_has_received(
    pd: Deployment, start: Start, prompts: Iterator[str], note: Note
) -> None:
    """D computes anew what it had read, as nobody has those blocks any more."""
    small = ("--max-model-len", "320", "--num-gpu-blocks-override", str(6 * PROMPT_BLOCKS))
    words = ("--no-enable-prefix-caching", *small)
    d = start("D-small", transfer={}, arguments=words, core=1).wait_ready()
    taken = list(islice(prompts, AT_ONCE))
    asked = [body(one, LONG, kv_transfer_params=prefill(pd.p, one)) for one in taken]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(lambda one: d.post("/v1/completions", one), asked))
    preempted = d.metric("num_preemptions_total")
    note(preempted=preempted, bytes_read=d.metric("nixl_bytes_transferred_sum"))
    if not preempted:
        raise HarnessError("D has preempted nothing", "a cache that is too small")
    for prompt, answer in zip(taken, answers, strict=True):
        assert answer.status_code == 200, answer.text
        computed = pd.p.post("/v1/completions", body(prompt, LONG)).json()
        assert tokens_of(answer.json()) == tokens_of(computed)
    assert pd.released() is not None

"""The KV cache is too small for what is asked: requests are preempted, and answered rightly."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

from tests.pd.client import body, prefill, tokens_of
from tests.pd.deployment import PROMPT_BLOCKS, Deployment, Note, Plain, Start, served
from tests.support.harness import HarnessError

AT_ONCE = 8
OWN = 4
"""Clients of P that have their answers from it."""
HANDED_OUT = 50
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


def test_a_p_that_preempts_what_it_is_to_hand_out(
    pd: Deployment, start: Start, plain: Plain, prompts: Iterator[str], note: Note
) -> None:
    """P serves clients of its own beside D, whose answers take its blocks one by one.

    Not 50297, which takes asynchronous scheduling: vLLM has none on CPUs.
    """
    words = ("--max-model-len", "320", "--num-gpu-blocks-override", str(9 * PROMPT_BLOCKS))
    p = start("P-small", transfer={}, arguments=(*words, "--no-enable-prefix-caching"))
    p.wait_ready()
    over = threading.Event()

    def converse(prompt: str) -> None:
        while not over.is_set():
            p.post("/v1/completions", body(prompt, LONG)).raise_for_status()

    wrong = []
    with ThreadPoolExecutor(OWN) as pool:
        own = [pool.submit(converse, next(prompts)) for _ in range(OWN)]
        try:
            for prompt in islice(prompts, HANDED_OUT):
                answer = served(pd.d, prompt, prefill(p, prompt))
                wrong += [answer] if answer != [plain[prompt]] else []
        finally:
            over.set()
        for one in own:
            one.result()
    preempted = p.metric("num_preemptions_total")
    note(preempted=preempted, wrong=len(wrong))
    if not preempted:
        raise HarnessError("P has preempted nothing", "a cache that is too small")
    assert not wrong, wrong[0]

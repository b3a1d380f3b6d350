"""Everything at once: 200 requests, of which a third goes wrong in one way or another."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import httpx
import pytest

from tests.pd.client import Params, body, gone_p, leave, prefill, tokens_of
from tests.pd.deployment import TOKENS, Deployment, Note, Plain
from tests.pd.model import CONTEXT

REQUESTS = 200
AT_ONCE = 8
SHARES = {"rejected": 40, "disconnected": 10, "failing handshake": 10}


@pytest.mark.shows("41269", "40364")
def test_two_hundred_requests(
    pd: Deployment, plain: Plain, prompts: Iterator[str], note: Note
) -> None:
    kinds = [kind for kind, share in SHARES.items() for _ in range(share)]
    served = REQUESTS - len(kinds)
    without = run(pd, plain, prompts, ["served"] * served)
    kinds += ["served"] * served
    random.Random(7).shuffle(kinds)  # noqa: S311 - the same order each time
    with_faults = run(pd, plain, prompts, kinds)
    released = pd.released()
    note(
        outcomes=with_faults.outcomes,
        right_per_s=with_faults.rate,
        right_per_s_without_faults=without.rate,
        released_s=released,
    )
    assert without.outcomes == {"served": served}
    assert with_faults.outcomes == dict(Counter(kinds))
    assert released is not None, "P holds blocks of a request that has ended"
    assert pd.p.healthy and pd.d.healthy


class Run:
    """What became of the requests of one run, and its right answers a second.

    The seconds are those until the last right answer: who waits for a P that is gone has company
    that waits with it, and goodput is that of the others.
    """

    def __init__(self, begin: float, results: list[tuple[str, float]]) -> None:
        self.outcomes = dict(Counter(outcome for outcome, _ in results))
        right = [ended for outcome, ended in results if outcome == "served"]
        self.rate = round(len(right) / (max(right, default=begin) - begin or 1.0), 1)


def run(pd: Deployment, plain: Plain, prompts: Iterator[str], kinds: list[str]) -> Run:
    """Send one request of each kind, `AT_ONCE` at a time."""
    gone = gone_p(pd.stale(), "under load")
    taken = list(islice(prompts, len(kinds)))
    begin = time.monotonic()

    def one(prompt: str, kind: str) -> tuple[str, float]:
        return send(pd, plain, gone, prompt, kind), time.monotonic()

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return Run(begin, list(pool.map(one, taken, kinds)))


def send(pd: Deployment, plain: Plain, gone: Params, prompt: str, kind: str) -> str:
    """Send one request and say what became of it: its kind, if that is what had to become."""
    try:
        # A P that is gone has nothing to free; the one that is there must not be asked for it.
        params = gone if kind == "failing handshake" else prefill(pd.p, prompt)
        asked = body(prompt, TOKENS, kv_transfer_params=params)
        if kind == "disconnected":
            # One that left earlier might come back, so P would hold its blocks for it.
            leave(pd.d.port, {**asked, "max_tokens": 400}, None)
            return kind
        if kind == "rejected":
            asked["max_tokens"] = CONTEXT + 1
        answer = pd.d.post("/v1/completions", asked)
    except (httpx.TransportError, OSError) as error:
        return f"{kind}: {type(error).__name__}"
    if kind == "rejected":
        return kind if answer.status_code == 400 else f"{kind}: {answer.status_code}"
    if answer.status_code != 200:
        return f"{kind}: {answer.status_code}"
    return kind if tokens_of(answer.json()) == [plain[prompt]] else f"{kind}: wrong tokens"

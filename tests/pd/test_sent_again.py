"""The same kv_transfer_params come to D a second time, P having computed other prompts meanwhile.

Clients put a refused request right and send it again, and proxies retry. What D has told P to free
it must not read any more: it holds another prompt's KV by then, and the answer would be HTTP 200
with wrong tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import httpx
import pytest

from tests.pd.client import Params, body, prefill, to_rank, tokens_of
from tests.pd.deployment import TOKENS, Deployment, Plain, Start, ask, served
from tests.pd.model import CONTEXT
from tests.pd.server import Server

OTHERS = 60
"""Prompts that P computes in between: more blocks than it has, so each freed one is overwritten."""


def with_too_many_tokens(d: Server, prompt: str, params: Params) -> httpx.Response:
    """Ask for more than the model's context has room for."""
    return d.post("/v1/completions", body(prompt, CONTEXT + 1, kv_transfer_params=params))


def for_a_rank_that_does_not_exist(d: Server, prompt: str, params: Params) -> httpx.Response:
    """Ask for a data-parallel rank that D does not have."""
    asked = body(prompt, 4, kv_transfer_params=params)
    return d.post("/v1/completions", asked, headers=to_rank(7))


@pytest.fixture
def others(pd: Deployment, prompts: Iterator[str]) -> Callable[[], None]:
    """Have P compute so many other prompts that no block which is free keeps its content."""

    def compute() -> None:
        for _ in range(OTHERS):
            pd.p.post("/v1/completions", body(next(prompts), 1)).raise_for_status()

    return compute


@pytest.mark.shows("K11")
@pytest.mark.parametrize("refused", [with_too_many_tokens, for_a_rank_that_does_not_exist])
def test_a_refused_request_that_is_put_right_gets_its_own_tokens(
    refused: Callable[[Server, str, Params], httpx.Response],
    pd: Deployment,
    prompts: Iterator[str],
    plain: Plain,
    others: Callable[[], None],
) -> None:
    """Patched P may have freed the blocks, as stock P has from 0.21.0 on; earlier it holds them."""
    prompt = next(prompts)
    params = prefill(pd.p, prompt)
    answer = refused(pd.d, prompt, params)
    assert answer.status_code >= 400, f"it was served: {answer.text}"
    others()
    assert served(pd.d, prompt, params) == [plain[prompt]]


@pytest.mark.shows("K11")
def test_a_request_that_was_served_and_is_sent_again_gets_its_own_tokens(
    pd: Deployment, prompts: Iterator[str], plain: Plain, others: Callable[[], None]
) -> None:
    """P has freed the blocks since the first read ended."""
    prompt = next(prompts)
    params = prefill(pd.p, prompt)
    assert tokens_of(ask(pd.d, prompt, params).json()) == [plain[prompt]]
    others()
    assert served(pd.d, prompt, params) == [plain[prompt]]


@pytest.mark.shows("K11")
@pytest.mark.parametrize("several", ["--api-server-count", "--data-parallel-size"])
def test_whoever_of_d_gets_it_then(
    several: str,
    pd: Deployment,
    start: Start,
    prompts: Iterator[str],
    plain: Plain,
    others: Callable[[], None],
) -> None:
    """D is several processes, and another one gets the request that was put right."""
    pd.d.stop()  # two cores are few
    words = ("--no-enable-prefix-caching", several, "2")
    d = start("D-of-two", transfer={}, core=0, workers=2, arguments=words).wait_ready()
    ranks = (0, 1) if several == "--data-parallel-size" else (None, None)
    for _ in range(4):  # connections fall to one API server or the other by chance
        asked = []
        for prompt in (next(prompts), next(prompts)):
            params = prefill(pd.p, prompt)
            refused = body(prompt, CONTEXT + 1, kv_transfer_params=params)
            answer = d.post("/v1/completions", refused, headers=to_rank(ranks[0]))
            assert answer.status_code == 400, answer.text
            asked.append(body(prompt, TOKENS, kv_transfer_params=params))
        others()
        for good in asked:
            answer = d.post("/v1/completions", good, headers=to_rank(ranks[1]))
            assert answer.status_code == 200, answer.text
            assert tokens_of(answer.json()) == [plain[good["prompt"]]]
    assert d.healthy

"""What a client is told of the caches, and what D's metrics say that it has computed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.pd.client import REMOTE_DECODE, body
from tests.pd.deployment import Deployment, Note
from tests.pd.server import BLOCK, Server


def answer(server: Server, prompt: str, params: dict[str, Any]) -> dict[str, Any]:
    """What a server answers with, one token of it."""
    asked = body(prompt, 1, kv_transfer_params=params)
    found: dict[str, Any] = server.post("/v1/completions", asked).raise_for_status().json()
    return found


def cached(answered: dict[str, Any]) -> int:
    """The tokens of the prompt that were cached, as the client is told; nothing says none."""
    details: dict[str, int] = answered["usage"].get("prompt_tokens_details") or {}
    return details.get("cached_tokens", 0)


@pytest.mark.shows("54222")
def test_a_client_hears_what_p_had_and_the_metrics_what_d_had(
    pd: Deployment, prompts: Iterator[str], note: Note
) -> None:
    prompt, metric = next(prompts), "request_prefill_kv_computed_tokens"
    before = [pd.d.metric(f"{metric}_{what}") for what in ("count", "sum")]
    told = []
    for _ in range(2):  # P knows the prompt the second time
        at_p = answer(pd.p, prompt, REMOTE_DECODE)
        told.append((cached(at_p), cached(answer(pd.d, prompt, at_p["kv_transfer_params"]))))
    requests, by_d = (
        pd.d.metric(f"{metric}_{what}") - then
        for what, then in zip(("count", "sum"), before, strict=True)
    )
    note(cached_at_p_and_told_by_d=told, computed_by_d=by_d)
    assert [at_p for at_p, _ in told] == [by for _, by in told]
    assert told[1][0] >= BLOCK > by_d
    assert requests == len(told)

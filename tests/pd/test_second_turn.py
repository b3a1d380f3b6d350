"""Transfers in both directions: for a second turn P reads what D has kept of the first.

From 0.21.0 on. Before that D keeps nothing, and P computes the second turn as any other prompt.
"""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.pd.client import REMOTE_DECODE, Params, body, prefill, tokens_of
from tests.pd.deployment import TOKENS, Note, Start, ask, served
from tests.pd.server import Server

BOTH_WAYS = {"bidirectional_kv_xfer": True, "kv_recompute_threshold": 0}
BOTH = "kv_both", "kv_both"
PATIENCE_S = 40.0
"""A handshake with nobody is given up after 5 s, or after 15 where it is tried again."""


def pair(start: Start, *roles: str) -> tuple[Server, Server]:
    """P and D of these roles, without prefix caches.

    What P does not compute of a second turn has come from D.
    """
    p, d = (
        start(
            name,
            transfer={"kv_role": role, "kv_connector_extra_config": BOTH_WAYS},
            core=core,
            arguments=("--no-enable-prefix-caching",),
        )
        for core, (name, role) in enumerate(zip("PD", roles, strict=True))
    )
    return p.wait_ready(), d.wait_ready()


def first_turn(p: Server, d: Server, prompt: str) -> tuple[list[int], Params]:
    """Have a first turn answered; return the prompt of the second, and what P is sent with it."""
    answer = ask(d, prompt, prefill(p, prompt)).raise_for_status().json()
    asked = answer["choices"][0]["prompt_token_ids"]
    said = [*asked, *tokens_of(answer)[0], *asked[:30]]
    return said, answer.get("kv_transfer_params") or REMOTE_DECODE


@pytest.mark.parametrize("roles", [BOTH, ("kv_producer", "kv_consumer")], ids="/".join)
def test_a_second_turn_is_answered_as_if_it_was_the_first(
    start: Start, roles: tuple[str, str], prompts: Iterator[str], note: Note
) -> None:
    p, d = pair(start, *roles)
    said, params = first_turn(p, d, next(prompts))
    expected = tokens_of(d.post("/v1/completions", body(said, TOKENS)).json())
    before = p.metric("nixl_bytes_transferred_sum")
    second = p.post("/v1/completions", body(said, 1, kv_transfer_params=params)).json()
    read = p.metric("nixl_bytes_transferred_sum") - before
    note(bytes_read_by_p=read)
    assert (read > 0) is ("remote_block_ids" in params)
    assert served(d, said, second["kv_transfer_params"]) == expected


@pytest.mark.shows("K25")
def test_a_second_turn_whose_d_is_gone_is_computed(start: Start, prompts: Iterator[str]) -> None:
    p, d = pair(start, *BOTH)
    said, params = first_turn(p, d, next(prompts))
    expected = tokens_of(d.post("/v1/completions", body(said, 1)).json())
    d.kill()
    assert answered(p, body(said, 1, kv_transfer_params=params)) == expected


def answered(server: Server, asked: dict[str, object]) -> list[list[int]] | str:
    """Return the tokens of each choice, or what happened instead."""
    try:
        answer = server.post("/v1/completions", asked, timeout=PATIENCE_S)
    except httpx.TimeoutException:
        return f"no answer in {PATIENCE_S:.0f} s"
    return tokens_of(answer.json()) if answer.status_code == 200 else answer.text

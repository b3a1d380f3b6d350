"""D reads when P's lease has ended and other prompts have the blocks: D has to notice.

The read succeeds, whatever is in the blocks by then; unnoticed, the answer is HTTP 200 with tokens
that come of other prompts. D recomputes here what it does not use, and so gives its own tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeAlias

import pytest

from tests.pd.client import body, prefill
from tests.pd.deployment import (
    PROMPT_BLOCKS,
    SHORT_LEASE_S,
    Deployment,
    Note,
    Plain,
    served,
    wait_for_the_end_of_leases,
)
from tests.pd.server import BLOCKS, Server
from tests.support.harness import HarnessError

OTHERS = tuple(
    f"{n:03d} " + "pack my box with five dozen jugs! " * 3
    for n in range(2 * BLOCKS // PROMPT_BLOCKS)
)
"""Prompts that P computes in between, of another text than `PROMPTS`: more blocks than it has, so
that each freed one is overwritten."""

Answer: TypeAlias = list[list[int]] | str
"""As `served` returns it."""


@pytest.fixture
def overwritten(p_short: Server) -> Callable[[], None]:
    """Wait until P has freed all blocks, and have it compute other prompts in them."""

    def compute() -> None:
        wait_for_the_end_of_leases(p_short, SHORT_LEASE_S)
        for other in OTHERS:
            p_short.post("/v1/completions", body(other, 1)).raise_for_status()

    return compute


def sent_late(d: Server, ask: Callable[[], Answer], overwritten: Callable[[], None]) -> Answer:
    """A router or a client was slow; nothing is wrong with D."""
    overwritten()
    return ask()


def sent_to_stopped(
    who: str, d: Server, ask: Callable[[], Answer], overwritten: Callable[[], None]
) -> Answer:
    """D, or a part of it, is stopped when the request comes, and goes on when it is too late.

    Where the workers alone are, D's scheduler decides to read within the lease. Where all of D is,
    it sees the request when it goes on, and then nothing has told it that time has passed.
    """
    with ThreadPoolExecutor(1) as pool:
        with d.stopped(who):
            asked = pool.submit(ask)
            overwritten()
            assert not asked.done(), f"D answers while it is stopped: {asked.result()}"
        return asked.result()


@pytest.mark.shows("K20")
@pytest.mark.parametrize(
    "answered",
    [
        pytest.param(sent_late, id="the request comes late"),
        pytest.param(partial(sent_to_stopped, "VLLM::Worker"), id="D's workers are stopped"),
        pytest.param(partial(sent_to_stopped, ""), id="all of D is stopped"),
    ],
)
def test_a_d_that_reads_after_the_lease_gives_its_own_tokens(
    answered: Callable[..., Answer],
    p_short: Server,
    pd: Deployment,
    prompts: Iterator[str],
    plain: Plain,
    overwritten: Callable[[], None],
    note: Note,
) -> None:
    read_in_time(p_short, pd.d, next(prompts), plain)
    prompt = next(prompts)
    ask = partial(served, pd.d, prompt, prefill(p_short, prompt))
    read = pd.d.metric("nixl_bytes_transferred_sum")
    answer = answered(pd.d, ask, overwritten)
    note(bytes_read=pd.d.metric("nixl_bytes_transferred_sum") - read, late=prompt)
    assert answer == [plain[prompt]]
    read_in_time(p_short, pd.d, next(prompts), plain)


def read_in_time(p: Server, d: Server, prompt: str, plain: Plain) -> None:
    """See that D reads from P and both go on; D knows P from here on."""
    before = d.metric("nixl_bytes_transferred_sum")
    assert served(d, prompt, prefill(p, prompt)) == [plain[prompt]]
    if d.metric("nixl_bytes_transferred_sum") == before:
        raise HarnessError("D has computed the prompt itself", "that it reads it from P")

"""D reads when P's lease has ended and other prompts have the blocks: D has to notice.

The read succeeds, whatever is in the blocks by then; unnoticed, the answer is HTTP 200 with tokens
that come of other prompts. D recomputes here what it does not use, and so gives its own tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.pd.client import body, prefill
from tests.pd.deployment import PROMPT_BLOCKS, Deployment, Note, Plain, Start, served
from tests.pd.server import BLOCKS, Server
from tests.support.harness import HarnessError

LEASE_S = 6
"""Of this P. From 0.22.0 on D renews a lease six times while it lasts, in whole seconds: a shorter
one would be renewed in each step."""

OTHERS = tuple(
    f"{n:03d} " + "pack my box with five dozen jugs! " * 3
    for n in range(2 * BLOCKS // PROMPT_BLOCKS)
)
"""Prompts that P computes in between, of another text than `PROMPTS`: more blocks than it has, so
that each freed one is overwritten."""


@pytest.fixture
def p(start: Start) -> Server:
    """Return a P with a short lease, for the D that all tests share."""
    return start(
        "P-short-lease",
        transfer={"kv_connector_extra_config": {"kv_lease_duration": LEASE_S}},
        environment={"VLLM_NIXL_ABORT_REQUEST_TIMEOUT": str(LEASE_S)},
    ).wait_ready()


@pytest.fixture
def overwritten(p: Server) -> Callable[[], None]:
    """Wait until P has freed all blocks, and have it compute other prompts in them."""

    def compute() -> None:
        deadline = time.monotonic() + LEASE_S + 60
        while held := p.blocks_held():
            if time.monotonic() > deadline:
                raise HarnessError(f"P holds {held} blocks a minute after the lease", "none")
            time.sleep(0.2)
        for other in OTHERS:
            p.post("/v1/completions", body(other, 1)).raise_for_status()

    return compute


@pytest.mark.shows("K20")
def test_a_request_that_comes_after_the_lease_gets_its_own_tokens(
    p: Server,
    pd: Deployment,
    prompts: Iterator[str],
    plain: Plain,
    overwritten: Callable[[], None],
    note: Note,
) -> None:
    """A router or a client was slow; nothing is wrong with D."""
    read_in_time(p, pd.d, next(prompts), plain)
    prompt = next(prompts)
    params = prefill(p, prompt)
    overwritten()
    read = pd.d.metric("nixl_bytes_transferred_sum")
    answer = served(pd.d, prompt, params)
    note(bytes_read=pd.d.metric("nixl_bytes_transferred_sum") - read, late=prompt)
    assert answer == [plain[prompt]]
    read_in_time(p, pd.d, next(prompts), plain)


@pytest.mark.shows("K20")
@pytest.mark.parametrize("who", ["VLLM::Worker", ""], ids=["its workers", "all of it"])
def test_a_d_that_is_stopped_past_the_lease_gives_its_own_tokens(
    who: str,
    p: Server,
    pd: Deployment,
    prompts: Iterator[str],
    plain: Plain,
    overwritten: Callable[[], None],
    note: Note,
) -> None:
    """Where the workers alone are stopped, D's scheduler decides to read within the lease.

    Where all of D is, it sees the request when it goes on, and then nothing has told it that time
    has passed.
    """
    read_in_time(p, pd.d, next(prompts), plain)
    prompt = next(prompts)
    params = prefill(p, prompt)
    read = pd.d.metric("nixl_bytes_transferred_sum")
    with ThreadPoolExecutor(1) as pool:
        with pd.d.stopped(who):
            asked = pool.submit(served, pd.d, prompt, params)
            overwritten()
            assert not asked.done(), f"D answers while it is stopped: {asked.result()}"
        answer = asked.result()
    note(bytes_read=pd.d.metric("nixl_bytes_transferred_sum") - read, late=prompt)
    assert answer == [plain[prompt]]
    read_in_time(p, pd.d, next(prompts), plain)


def read_in_time(p: Server, d: Server, prompt: str, plain: Plain) -> None:
    """See that D reads from P and both go on; D knows P from here on."""
    before = d.metric("nixl_bytes_transferred_sum")
    assert served(d, prompt, prefill(p, prompt)) == [plain[prompt]]
    if d.metric("nixl_bytes_transferred_sum") == before:
        raise HarnessError("D has computed the prompt itself", "that it reads it from P")

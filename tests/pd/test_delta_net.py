"""Gated delta nets (Qwen3-Next, Qwen3.5): a state begins with nothing, however short the prompt.

P drops a prompt's last token, so of a prompt of two tokens it computes one, which looks like a step
of an answer. Up to 0.30.0 vLLM takes it for one, and goes on from what the state's block holds.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.pd.client import body, prefill, tokens_of
from tests.pd.deployment import PROMPTS, Note, Plain, Start, leases_of
from tests.pd.model import make_delta_net
from tests.pd.server import Server

_SHORT = ("OV", "Qe", "AR", "CZ")
"""Prompts with clear answers: in each of the first tokens the second best is 0.2 behind.

The kernels for CPUs round to 16 bits, and a step of two tokens otherwise than two steps of one:
logits differ by 0.03 where nothing is wrong."""
_CLEAR = 2
"""How many tokens of an answer are compared."""
_BLOCKS = 32
"""So few that each has been of some request before long."""
_LEASE_S = 300
"""Longer than a first read takes on a busy machine: none may end here."""
_LAYOUT = {"VLLM_SSM_CONV_STATE_LAYOUT": "DS"}
"""The layout of states in which NIXL can take them apart by rank."""

pytestmark = pytest.mark.since("0.28.0")

DeltaNet = Callable[..., Server]


@pytest.fixture
def delta_net(start: Start, model: Path) -> DeltaNet:
    """Starts a server of the model, whose kernels for CPUs take no numbers but of 16 bits."""
    folder = make_delta_net(model.with_name("delta-net"))
    words = ("--dtype", "bfloat16", "--num-gpu-blocks-override", str(_BLOCKS))

    def one(name: str, **more: object) -> Server:
        return start(
            f"delta-net-{name}",
            model=folder,
            arguments=[*words, "--no-enable-prefix-caching"],
            environment=_LAYOUT,
            **more,
        )

    return one


@pytest.fixture
def known(delta_net: DeltaNet) -> Plain:
    """The tokens of a server without P/D, one that has computed nothing before."""
    server = delta_net("plain").wait_ready()
    answers = [server.post("/v1/completions", body(one, _CLEAR)).json() for one in _SHORT]
    server.stop()
    return {one: tokens_of(answer)[0] for one, answer in zip(_SHORT, answers, strict=True)}


# The CPU build of 0.32.0 ends over a prompt of which P computes one token ("expect x to be
# transposed"), stock and patched.
@pytest.mark.until("0.28.0")
@pytest.mark.shows("51565")
def test_a_prompt_of_two_tokens(delta_net: DeltaNet, known: Plain, note: Note) -> None:
    transfer = {"transfer": leases_of(_LEASE_S)["transfer"]}
    p, d = delta_net("P", **transfer), delta_net("D", core=1, **transfer)
    p.wait_ready()
    d.wait_ready()
    used = body(list(PROMPTS[: 2 * _BLOCKS]), 1)
    p.post("/v1/completions", used).raise_for_status()
    got = {}
    for prompt in _SHORT:
        asked = body(prompt, _CLEAR, kv_transfer_params=prefill(p, prompt))
        answer = d.post("/v1/completions", asked).raise_for_status()
        got[prompt] = tokens_of(answer.json())[0]
    note(wrong_answers=sum(got[prompt] != known[prompt] for prompt in _SHORT))
    assert d.metric("nixl_bytes_transferred_sum") > 0
    assert got == known

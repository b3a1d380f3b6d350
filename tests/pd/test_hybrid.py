"""A model with recurrent states beside attention: D goes on from P's states as from its own.

Before 0.28.0 vLLM has no kernels for such models on CPUs; test_block_ratios.py has their transfers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.pd.client import REMOTE_DECODE, body, tokens_of
from tests.pd.deployment import PROMPTS, TOKENS, Note, Plain, Start, leases_of
from tests.pd.model import make_hybrid
from tests.pd.server import BLOCK, BLOCKS, Server
from tests.pd.test_block_size import wrong

_ASKED = PROMPTS[:6]
_LEASE_S = 300
"""Longer than a first read takes on a busy machine: none may end here."""
_LAYOUT = {"VLLM_SSM_CONV_STATE_LAYOUT": "DS"}
"""The layout of states in which NIXL can take them apart by rank."""

pytestmark = pytest.mark.since("0.28.0")

Hybrid = Callable[..., Server]


@pytest.fixture
def hybrid(start: Start, model: Path) -> Hybrid:
    """Starts a server of the model, without a prefix cache: what it does not compute is P's."""
    folder = make_hybrid(model.with_name("hybrid"))

    def one(name: str, *words: str, core: int = 0, **more: object) -> Server:
        arguments = ["--no-enable-prefix-caching", *words]
        return start(
            f"hybrid-{name}",
            model=folder,
            core=core,
            arguments=arguments,
            **{"environment": _LAYOUT, **more},
        )

    return one


@pytest.fixture
def known(hybrid: Hybrid) -> Plain:
    """The tokens of a server without P/D."""
    server = hybrid("plain").wait_ready()
    answer = server.post("/v1/completions", body(list(_ASKED), TOKENS)).raise_for_status()
    server.stop()
    return dict(zip(_ASKED, tokens_of(answer.json()), strict=True))


@pytest.mark.parametrize(
    "size",
    [
        pytest.param(BLOCK, id="equal blocks"),
        # Kernel blocks are equal all the same.
        pytest.param(2 * BLOCK, id="larger blocks on D", marks=pytest.mark.until("0.28.0")),
    ],
)
def test_tokens_are_those_of_a_plain_server(
    size: int, hybrid: Hybrid, known: Plain, note: Note
) -> None:
    lease = leases_of(_LEASE_S)
    transfers = {"transfer": lease["transfer"]}
    blocks = ("--block-size", str(size), "--num-gpu-blocks-override", str(BLOCKS * BLOCK // size))
    p, d = hybrid("P", **transfers), hybrid("D", *blocks, core=1, **transfers)
    p.wait_ready()
    d.wait_ready()
    assert len({*map(tuple, known.values())}) == len(_ASKED)  # they hang on the first block
    assert wrong(p, d, known, iter(_ASKED)) == {}
    moved = d.metric("nixl_bytes_transferred_sum")
    note(bytes_moved=moved)
    assert moved > 0
    assert p.blocks_held() == 0


@pytest.mark.since("0.32.0")
@pytest.mark.shows("K07")
def test_a_p_with_smaller_kernel_blocks_is_refused(hybrid: Hybrid, known: Plain) -> None:
    """Attention on CPUs packs keys by the size of a block, and here states are in front of it."""
    lease = {"transfer": leases_of(_LEASE_S)["transfer"]}
    blocks = ("--block-size", str(2 * BLOCK), "--num-gpu-blocks-override", str(BLOCKS // 2))
    p, d = hybrid("P", **lease), hybrid("D", *blocks, core=1, **lease)
    p.wait_ready()
    d.wait_ready()
    assert wrong(p, d, known, iter(_ASKED)) == {}
    assert "CPU_ATTN lays them out differently" in d.text()


# The CPU build of 0.32.0 cannot compute such a prompt on P: its kernel gives one state where
# mamba_mixer2 looks for one of each chunk (IndexError).
@pytest.mark.until("0.28.0")
@pytest.mark.shows("53523")
def test_a_prompt_that_comes_again(hybrid: Hybrid) -> None:
    """P caches prefixes of states; the prompt is whole blocks and the token that is D's."""
    caching = ("--enable-prefix-caching", "--mamba-cache-mode", "align")
    transfers = leases_of(_LEASE_S)
    transfer = {"transfer": transfers["transfer"]}
    plain, p, d = (
        hybrid("plain"),
        hybrid("P", *caching, **transfer),
        hybrid("D", core=1, **transfer),
    )
    for server in (plain, p, d):
        server.wait_ready()
    size = int(p.samples("cache_config_info")[0][0]["block_size"])
    prompt = (PROMPTS[0] * 9)[: 2 * size + 1]
    known = tokens_of(plain.post("/v1/completions", body(prompt, TOKENS)).json())[0]
    assert wrong(p, d, {prompt: known}, iter([prompt])) == {}
    again = p.post("/v1/completions", body(prompt, 1, kv_transfer_params=REMOTE_DECODE))
    assert again.status_code == 200, again.text
    assert wrong(p, d, {prompt: known}, iter([prompt])) == {}

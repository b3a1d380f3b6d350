"""40449: a latent KV cache is the same on every rank of P, so D reads one rank and tells all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.pd.client import body, prefill
from tests.pd.deployment import PROMPTS, Note, Start, leases_of
from tests.pd.model import CONTEXT

_LEASE_S = 300
"""Longer than a first read takes on a busy machine: none may end here."""


@pytest.fixture(scope="module")
def latent_model(model: Path) -> Path:
    """A DeepSeek-like model of two dense layers without weights, which vLLM draws at random."""
    folder = model.with_name("latent")
    folder.mkdir(exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / name, folder)
    llama = json.loads((model / "config.json").read_text())
    shared = ("vocab_size", "bos_token_id", "eos_token_id", "torch_dtype", "rms_norm_eps")
    config = {
        **{name: llama[name] for name in shared},
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "first_k_dense_replace": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "kv_lora_rank": 512,  # with the next one the only size that vLLM takes
        "qk_rope_head_dim": 64,
        "q_lora_rank": None,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rope_theta": 10000.0,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder


@pytest.mark.shows("40449")
def test_every_rank_of_p_is_told(start: Start, latent_model: Path, note: Note) -> None:
    drawn = {"model": latent_model, **leases_of(_LEASE_S)}
    words = ["--load-format", "dummy", "--no-enable-prefix-caching"]
    p = start("P-mla", arguments=[*words, "--tensor-parallel-size", "2"], workers=2, **drawn)
    d = start("D-mla", arguments=words, core=1, **drawn)
    p.wait_ready()
    d.wait_ready()
    for prompt in PROMPTS[:3]:
        answer = d.post("/v1/completions", body(prompt, kv_transfer_params=prefill(p, prompt)))
        assert answer.status_code == 200, (answer.text, d.tail())
    assert d.metric("nixl_bytes_transferred_sum") > 0
    held = p.blocks_held()
    note(blocks_held=held)
    assert "Potentially invalid KV blocks" not in p.text()
    assert held == 0

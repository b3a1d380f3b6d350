"""A small Llama with random weights and one token for each byte: nothing is downloaded.

The weights are drawn so that greedy tokens hang on the KV cache: attention is sharp and adds as
much to the residual stream as the token itself. A block that lands in the wrong place, or not at
all, gives other tokens.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CONTEXT = 1024
"""The longest prompt and answer together, in tokens."""

_HIDDEN = 64
_INNER = 128
_LAYERS = 2
_HEADS = 2  # of 32 dimensions, the smallest that vLLM's CPU attention takes; two for TP 2
_END = "<end>"
_SEED = 20


def make_model(folder: Path) -> Path:
    """Write the model into `folder` and return it; the same files each time."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = _write_tokenizer(folder)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS,
        "head_dim": _HIDDEN // _HEADS,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "vocab_size": vocabulary,
        "bos_token_id": vocabulary - 1,
        "eos_token_id": vocabulary - 1,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file(_weights(vocabulary), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _weights(vocabulary: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(_SEED)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> np.ndarray:
        return (random.standard_normal((rows, columns)) * gain / columns**0.5).astype(np.float32)

    ones = np.ones(_HIDDEN, dtype=np.float32)
    weights = {
        "model.embed_tokens.weight": matrix(vocabulary, _HIDDEN, _HIDDEN**0.5),
        "model.norm.weight": ones,
        "lm_head.weight": matrix(vocabulary, _HIDDEN),
    }
    for layer in range(_LAYERS):
        name = f"model.layers.{layer}"
        weights |= {
            f"{name}.input_layernorm.weight": ones,
            f"{name}.post_attention_layernorm.weight": ones,
            f"{name}.self_attn.q_proj.weight": matrix(_HIDDEN, _HIDDEN, 2.0),
            f"{name}.self_attn.k_proj.weight": matrix(_HIDDEN, _HIDDEN, 2.0),
            f"{name}.self_attn.v_proj.weight": matrix(_HIDDEN, _HIDDEN),
            f"{name}.self_attn.o_proj.weight": matrix(_HIDDEN, _HIDDEN, 2.0),
            f"{name}.mlp.gate_proj.weight": matrix(_INNER, _HIDDEN),
            f"{name}.mlp.up_proj.weight": matrix(_INNER, _HIDDEN),
            f"{name}.mlp.down_proj.weight": matrix(_HIDDEN, _INNER),
        }
    return weights


def _write_tokenizer(folder: Path) -> int:
    """Write a tokenizer whose tokens are the bytes and an end; return how many there are."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*alphabet, _END])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([_END])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _END,
        "eos_token": _END,
        "pad_token": _END,
        "model_max_length": CONTEXT,
        "chat_template": "{% for message in messages %}{{ message.content }}\n{% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    return len(vocabulary)

"""Small models with random weights and one token for each byte: nothing is downloaded.

A Llama, and two with recurrent states beside their attention: a Nemotron-H, and a Qwen3.5, whose
states are of gated delta nets. The weights are drawn so that
greedy tokens hang on what is cached: attention is sharp and, as a state, adds as much to the
residual stream as the token itself. A block that lands in the wrong place, or not at all, gives
other tokens.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
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

_PATTERN = "M*-M"
"""Layers of the hybrid: M keeps a state, * attends, - does neither."""
_STATE = 16
_STATE_HEADS = 4
_KERNEL = 4

_DELTA_LAYERS = ("linear_attention", "full_attention", "linear_attention")
_DELTA_HEADS = 2
_DELTA_DIM = 64  # of a head, the smallest that vLLM's kernel for CPUs takes

_Weights = dict[str, np.ndarray]
_Random = np.random.Generator
_Mixer = Callable[[_Random, str], _Weights]


def make_model(folder: Path) -> Path:
    """Write the Llama into `folder` and return it; the same files each time."""
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
    }
    return _write(folder, config, _llama)


def make_hybrid(folder: Path) -> Path:
    """Write the Nemotron-H into `folder` and return it; the same files each time."""
    config = {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "num_hidden_layers": len(_PATTERN),
        "hybrid_override_pattern": _PATTERN,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS,
        "head_dim": _HIDDEN // _HEADS,
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "mamba_num_heads": _STATE_HEADS,
        "mamba_head_dim": _INNER // _STATE_HEADS,
        "ssm_state_size": _STATE,
        "n_groups": 1,
        "conv_kernel": _KERNEL,
        "chunk_size": 32,
        "use_conv_bias": True,
        "use_bias": False,
        "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": False,
    }
    return _write(folder, config, _nemotron)


def make_delta_net(folder: Path) -> Path:
    """Write the Qwen3.5 into `folder` and return it; the same files each time."""
    config = {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "num_hidden_layers": len(_DELTA_LAYERS),
        "layer_types": _DELTA_LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS,
        "head_dim": _HIDDEN // _HEADS,
        "linear_conv_kernel_dim": _KERNEL,
        "linear_num_key_heads": _DELTA_HEADS,
        "linear_num_value_heads": _DELTA_HEADS,
        "linear_key_head_dim": _DELTA_DIM,
        "linear_value_head_dim": _DELTA_DIM,
        "mamba_ssm_dtype": "float32",
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
    }
    return _write(folder, config, _qwen)


def _write(
    folder: Path, config: dict[str, object], draw: Callable[[_Random, int], _Weights]
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = _write_tokenizer(folder)
    config |= {
        "torch_dtype": "float32",
        "vocab_size": vocabulary,
        "bos_token_id": vocabulary - 1,
        "eos_token_id": vocabulary - 1,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    weights = draw(np.random.default_rng(_SEED), vocabulary)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _matrix(random: _Random, rows: int, columns: int, gain: float = 1.0) -> np.ndarray:
    return (random.standard_normal((rows, columns)) * gain / columns**0.5).astype(np.float32)


def _llama(random: _Random, vocabulary: int) -> _Weights:
    return _decoder(random, vocabulary, np.ones(_HIDDEN, dtype=np.float32), [_plain] * _LAYERS)


def _decoder(
    random: _Random, vocabulary: int, norm: np.ndarray, mixers: Sequence[_Mixer]
) -> _Weights:
    """A model whose layers have each a mixer and a gated network, behind norms of one weight."""
    matrix = functools.partial(_matrix, random)
    weights = {
        "model.embed_tokens.weight": matrix(vocabulary, _HIDDEN, _HIDDEN**0.5),
        "model.norm.weight": norm,
        "lm_head.weight": matrix(vocabulary, _HIDDEN),
    }
    for layer, mixer in enumerate(mixers):
        name = f"model.layers.{layer}"
        weights |= {
            f"{name}.input_layernorm.weight": norm,
            f"{name}.post_attention_layernorm.weight": norm,
            **mixer(random, name),
            f"{name}.mlp.gate_proj.weight": matrix(_INNER, _HIDDEN),
            f"{name}.mlp.up_proj.weight": matrix(_INNER, _HIDDEN),
            f"{name}.mlp.down_proj.weight": matrix(_HIDDEN, _INNER),
        }
    return weights


def _plain(random: _Random, layer: str) -> _Weights:
    return _attention(random, f"{layer}.self_attn")


def _nemotron(random: _Random, vocabulary: int) -> _Weights:
    matrix = functools.partial(_matrix, random)
    ones = np.ones(_HIDDEN, dtype=np.float32)
    weights = {
        "backbone.embeddings.weight": matrix(vocabulary, _HIDDEN, _HIDDEN**0.5),
        "backbone.norm_f.weight": ones,
        "lm_head.weight": matrix(vocabulary, _HIDDEN),
    }
    for layer, kind in enumerate(_PATTERN):
        name = f"backbone.layers.{layer}.mixer"
        weights[f"backbone.layers.{layer}.norm.weight"] = ones
        if kind == "M":
            weights |= _state(random, name)
        elif kind == "*":
            weights |= _attention(random, name)
        else:
            weights[f"{name}.up_proj.weight"] = matrix(_INNER, _HIDDEN)
            weights[f"{name}.down_proj.weight"] = matrix(_HIDDEN, _INNER)
    return weights


def _qwen(random: _Random, vocabulary: int) -> _Weights:
    norm = np.zeros(_HIDDEN, dtype=np.float32)  # its norms have a weight of one more than they say
    mixers = [_gated if kind == "full_attention" else _delta_net for kind in _DELTA_LAYERS]
    return _decoder(random, vocabulary, norm, mixers)


def _gated(random: _Random, layer: str) -> _Weights:
    """Attention whose heads have a gate each, beside the query, and norms."""
    name = f"{layer}.self_attn"
    head = np.ones(_HIDDEN // _HEADS, dtype=np.float32)
    return {
        **_attention(random, name),
        f"{name}.q_proj.weight": _matrix(random, 2 * _HIDDEN, _HIDDEN),
        f"{name}.q_norm.weight": head,
        f"{name}.k_norm.weight": head,
    }


def _delta_net(random: _Random, layer: str) -> _Weights:
    """A layer whose state forgets slowly, like `_state`."""
    name = f"{layer}.linear_attn"
    inner = _DELTA_HEADS * _DELTA_DIM
    return {
        f"{name}.in_proj_qkv.weight": _matrix(random, 3 * inner, _HIDDEN),
        f"{name}.in_proj_z.weight": _matrix(random, inner, _HIDDEN),
        f"{name}.in_proj_b.weight": _matrix(random, _DELTA_HEADS, _HIDDEN),
        f"{name}.in_proj_a.weight": _matrix(random, _DELTA_HEADS, _HIDDEN),
        f"{name}.conv1d.weight": _matrix(random, 3 * inner, _KERNEL)[:, None],
        f"{name}.A_log": np.full(_DELTA_HEADS, -4.0, dtype=np.float32),
        f"{name}.dt_bias": np.zeros(_DELTA_HEADS, dtype=np.float32),
        f"{name}.norm.weight": np.ones(_DELTA_DIM, dtype=np.float32),
        f"{name}.out_proj.weight": _matrix(random, _HIDDEN, inner, 2.0),
    }


def _attention(random: _Random, name: str) -> _Weights:
    gains = {"q": 2.0, "k": 2.0, "v": 1.0, "o": 2.0}
    return {
        f"{name}.{one}_proj.weight": _matrix(random, _HIDDEN, _HIDDEN, gain)
        for one, gain in gains.items()
    }


def _state(random: _Random, name: str) -> _Weights:
    """A layer whose state forgets slowly: some 1 % with each token."""
    convolved = _INNER + 2 * _STATE

    def all_heads(value: float) -> np.ndarray:
        return np.full(_STATE_HEADS, value, dtype=np.float32)

    return {
        f"{name}.in_proj.weight": _matrix(random, _INNER + convolved + _STATE_HEADS, _HIDDEN),
        f"{name}.conv1d.weight": _matrix(random, convolved, _KERNEL)[:, None],
        f"{name}.conv1d.bias": np.zeros(convolved, dtype=np.float32),
        f"{name}.A_log": all_heads(-4.0),
        f"{name}.D": all_heads(1.0),
        f"{name}.dt_bias": all_heads(0.0),
        f"{name}.norm.weight": np.ones(_INNER, dtype=np.float32),
        f"{name}.out_proj.weight": _matrix(random, _HIDDEN, _INNER, 2.0),
    }


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

"""A model hub's cache without a hub: the models that upstream's own tests name, without weights.

    python -m scripts.upstream_tests.models DIR
    HF_HOME=DIR HF_HUB_OFFLINE=1 python -m pytest ...

Each model has a `config.json` with the published dimensions, a `generation_config.json`, and a
tokenizer that we make here: one token for each byte, and a beginning and an end. That is enough for
whatever builds a `VllmConfig`, a scheduler, a worker or a serving layer; a test that loads weights,
or expects certain token ids, fails for want of a hub as it should. No file comes from the hub.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripts.system.console import entry, out

_REVISION = "0" * 40  # the folder of the only snapshot; a hub would have a commit there
_BOS, _EOS = "<s>", "</s>"
_CHAT = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def _opt(hidden: int, layers: int, heads: int, projected: int) -> dict[str, Any]:
    return {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "hidden_size": hidden,
        "ffn_dim": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "word_embed_proj_dim": projected,
        "do_layer_norm_before": hidden == projected,
        "max_position_embeddings": 2048,
        "vocab_size": 50272,
        "torch_dtype": "float16",
    }


_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}

MODELS: dict[str, dict[str, Any]] = {
    "facebook/opt-125m": _opt(768, 12, 12, 768),
    "facebook/opt-350m": _opt(1024, 24, 16, 512),
    "meta-llama/Llama-3.2-1B": _LLAMA,
    "meta-llama/Llama-3.2-1B-Instruct": _LLAMA,
    "Qwen/Qwen3-0.6B": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "vocab_size": 151936,
        "torch_dtype": "bfloat16",
    },
    "openai-community/gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_positions": 1024,
        "vocab_size": 50257,
        "torch_dtype": "float32",
    },
    "google/gemma-3-1b-it": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "query_pre_attn_scalar": 256,
        "rope_theta": 1000000,
        "rope_local_base_freq": 10000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "vocab_size": 262144,
        "torch_dtype": "bfloat16",
    },
    "state-spaces/mamba-130m-hf": {
        "architectures": ["MambaForCausalLM"],
        "model_type": "mamba",
        "hidden_size": 768,
        "intermediate_size": 1536,
        "state_size": 16,
        "conv_kernel": 4,
        "expand": 2,
        "time_step_rank": 48,
        "num_hidden_layers": 24,
        "vocab_size": 50280,
        "torch_dtype": "float32",
    },
    "tiiuae/falcon-mamba-7b": {
        "architectures": ["FalconMambaForCausalLM"],
        "model_type": "falcon_mamba",
        "hidden_size": 4096,
        "intermediate_size": 8192,
        "state_size": 16,
        "conv_kernel": 4,
        "expand": 16,
        "time_step_rank": 256,
        "num_hidden_layers": 64,
        "vocab_size": 65024,
        "torch_dtype": "bfloat16",
    },
    "tiiuae/Falcon-H1-0.5B-Instruct": {
        "architectures": ["FalconH1ForCausalLM"],
        "model_type": "falcon_h1",
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "mamba_chunk_size": 128,
        "mamba_d_conv": 4,
        "mamba_d_head": 64,
        "mamba_d_ssm": 1536,
        "mamba_d_state": 128,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_n_heads": 24,
        "max_position_embeddings": 16384,
        "vocab_size": 32784,
        "torch_dtype": "bfloat16",
    },
}
"""`config.json` by model: the published dimensions, which some tests compute with."""


def write_models(home: Path, models: Mapping[str, Mapping[str, Any]] = MODELS) -> Path:
    """Write `models` into the hub's cache below `home` and return `home` (for `HF_HOME`)."""
    for name, config in models.items():
        folder = home / "hub" / f"models--{name.replace('/', '--')}"
        files = {
            "config.json": {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1, **config},
            "generation_config.json": {"bos_token_id": 0, "eos_token_id": 1},
            "tokenizer.json": _tokenizer(),
            "tokenizer_config.json": {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": _BOS,
                "eos_token": _EOS,
                "chat_template": _CHAT,
            },
        }
        snapshot = folder / "snapshots" / _REVISION
        snapshot.mkdir(parents=True, exist_ok=True)
        for file, content in files.items():
            (snapshot / file).write_text(json.dumps(content, indent=1), encoding="utf-8")
        reference = folder / "refs" / "main"
        reference.parent.mkdir(exist_ok=True)
        reference.write_text(_REVISION)
    return home


def _tokenizer() -> dict[str, Any]:
    """Return a byte-level BPE without merges, as the tokenizers library stores it."""
    special = [_BOS, _EOS]
    tokens = [*special, *_byte_characters()]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": number,
                "content": token,
                "special": True,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
            }
            for number, token in enumerate(special)
        ],
        "normalizer": None,
        "pre_tokenizer": {**byte_level, "use_regex": False},
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [],
        },
    }


def _byte_characters() -> list[str]:
    """Return the visible character that stands for each byte in a byte-level vocabulary.

    Printable Latin-1 characters stand for themselves; the others, in order, for those from
    U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(0x100)]


def main() -> None:
    """Write the cache into the folder that the command line names."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.upstream_tests.models",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    home = write_models(parser.parse_args().folder)
    out.print(f"{len(MODELS)} models below {home}; use it: HF_HOME={home} HF_HUB_OFFLINE=1")


if __name__ == "__main__":
    entry(main)

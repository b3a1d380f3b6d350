"""A model that vLLM can be configured for: a folder, no weights, and no model hub."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from vllm.model_executor.models.registry import ModelRegistry

HEADS, HEAD_SIZE, LAYERS = 8, 8, 2
"""Attention and KV heads, elements per head, and layers, unless a test says otherwise."""

_folders: list[tempfile.TemporaryDirectory[str]] = []  # removed when the process ends


class _NeverBuilt(torch.nn.Module):  # type: ignore[misc, unused-ignore]
    """Registered with vLLM so that no model file is looked at."""

    def __init__(self, vllm_config: object, prefix: str = "") -> None:
        super().__init__()

    def embed_input_ids(self, input_ids: object) -> object:
        return input_ids

    def forward(self, input_ids: object, positions: object) -> object:
        return input_ids

    def compute_logits(self, hidden_states: object) -> object:
        return hidden_states


def model_folder(
    architecture: str,
    **settings: Any,  # noqa: ANN401 - any of a model's
) -> Path:
    """Make a folder with the `config.json` of a small Llama-like model.

    Args:
        architecture: the name under which vLLM gets to know it.
        settings: what differs from it, or comes on top.
    """
    ModelRegistry.register_model(architecture, _NeverBuilt)
    _folders.append(tempfile.TemporaryDirectory(prefix="kvfix-model-"))
    folder = Path(_folders[-1].name)
    config = {
        "architectures": [architecture],
        "model_type": "llama",
        "hidden_size": HEADS * HEAD_SIZE,
        "intermediate_size": 128,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "max_position_embeddings": 2048,
        "torch_dtype": "float16",
    }
    (folder / "config.json").write_text(json.dumps(config | settings))
    return folder

"""Attention within prompts, from the cache's latents taken apart, in plain torch.

From 0.25.0 on vLLM looks for a backend of its own for that as it makes a layer, and none of those
that there are can be imported on a CPU.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch.nn.functional import scaled_dot_product_attention
from vllm.v1.attention.backends.mla.prefill import (
    MLAPrefillBackend,
    MLAPrefillBackendEnum,
    register_mla_prefill_backend,
)


class Prefill(MLAPrefillBackend):
    """Attention within each prompt; N heads, K the size of a key, V that of a value."""

    @staticmethod
    def get_name() -> str:
        return "TORCH_PREFILL"

    def run_prefill_new_tokens(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object, **__: object
    ) -> torch.Tensor:
        """Return (tokens, N, V) for queries and keys (tokens, N, K) and values (tokens, N, V)."""
        seen = torch.empty_like(v)
        for begin, end in pairwise(self._prefill_metadata.query_start_loc.tolist()):
            of_prompt = (part[begin:end].transpose(0, 1) for part in (q, k, v))
            attended = scaled_dot_product_attention(*of_prompt, is_causal=True, scale=self.scale)
            seen[begin:end] = attended.transpose(0, 1)
        return seen

    def run_prefill_context_chunk(self, *_: object, **__: object) -> tuple[torch.Tensor, ...]:
        """Is not asked for."""
        raise NotImplementedError


# The one that vLLM falls back to where it does not know the device.
register_mla_prefill_backend(MLAPrefillBackendEnum.FLASH_ATTN, f"{__name__}.{Prefill.__name__}")

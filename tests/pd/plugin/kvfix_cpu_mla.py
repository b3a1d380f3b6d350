"""What vLLM's own attention over a latent KV cache lacks on CPUs, for 0.28.0 and later.

From there on vLLM's CPU platform has a cache and a decode kernel for these models (`cpu_mla.py`).
Its prefill is left to a backend of which none runs on a CPU, and the CPU's linear layer drops the
weight that the attention takes apart. Both are mended here, and the rest is vLLM's. There are no
chunks of context, which vLLM switches off for these models on a CPU.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from kvfix_latent import Unpacked
from torch.nn.functional import scaled_dot_product_attention
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl
from vllm.v1.attention.backends.mla.prefill import (
    MLAPrefillBackend,
    MLAPrefillBackendEnum,
    register_mla_prefill_backend,
)


class Backend(CPUMLABackend):
    """What vLLM asks for by its path."""

    @staticmethod
    def get_impl_cls() -> type[Attention]:
        return Attention


class Attention(CPUMLAImpl):
    """vLLM's, with a weight that stays."""

    def __init__(self, *arguments: object, **mla: object) -> None:
        super().__init__(*arguments, **mla)
        self.kv_b_proj.quant_method = Unpacked()


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

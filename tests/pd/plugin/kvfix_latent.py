"""Attention over a latent KV cache in plain torch: slow, and enough for a P/D deployment.

vLLM's CPU platform has none before 0.28.0; for what it has then see `kvfix_cpu_mla`. The cache is
vLLM's own, in shape and content; there are no prefix hits and no chunked prefill, which vLLM
switches off for these models on a CPU.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend, MLACommonMetadata
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.v1.attention.backend import MLAAttentionImpl

# From 0.21.0 on each layer also makes one of these. `LatentAttention` never asks it for anything,
# and without its kernels it must not be made as it would make itself; from 0.25.0 on it cannot even
# be imported.
try:
    from vllm.v1.attention.backends.mla.prefill import flash_attn
except ImportError:
    with suppress(ImportError):
        import kvfix_prefill  # noqa: F401 - registers itself
else:
    del flash_attn.FlashAttnPrefillBackend.__init__


class LatentBackend(MLACommonBackend):
    """What vLLM asks for by its path."""

    @staticmethod
    def get_name() -> str:
        return "TORCH_MLA"

    @staticmethod
    def get_impl_cls() -> type[LatentAttention]:
        return LatentAttention


class LatentAttention(MLAAttentionImpl[MLACommonMetadata]):
    """Attention of one layer; L is the latent size, R what carries the position, N the heads."""

    def __init__(self, num_heads: int, scale: float, **mla: Any) -> None:  # noqa: ANN401
        self.num_heads = num_heads
        self.scale = scale
        self.latent: int = mla["kv_lora_rank"]
        self.key_size: int = mla["qk_nope_head_dim"]
        self.value_size: int = mla["v_head_dim"]
        self.kv_b_proj = mla["kv_b_proj"]
        self.kv_b_proj.quant_method = Unpacked()

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
    ) -> None:
        """Write what tokens leave behind, (tokens, L) and (tokens, 1, R), into their slots."""
        slots = slot_mapping.flatten()
        kv_cache.flatten(0, 1)[slots] = torch.cat([kv_c_normed, k_pe.squeeze(1)], -1)[: len(slots)]

    def forward_mha(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: MLACommonMetadata,
        k_scale: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """Attend within each prompt: queries (tokens, N, key + R) into `output` (tokens, N * V)."""
        assert attn_metadata.prefill is not None
        assert attn_metadata.prefill.chunked_context is None
        expanded = self.kv_b_proj(kv_c_normed)[0].unflatten(-1, (self.num_heads, -1))
        keys, values = expanded.split([self.key_size, self.value_size], dim=-1)
        keys = torch.cat([keys, k_pe.expand(-1, self.num_heads, -1)], dim=-1)
        for begin, end in pairwise(attn_metadata.prefill.query_start_loc.tolist()):
            of_prompt = (part[begin:end].transpose(0, 1) for part in (q, keys, values))
            seen = scaled_dot_product_attention(*of_prompt, is_causal=True, scale=self.scale)
            output[begin:end] = seen.transpose(0, 1).flatten(1)

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: MLACommonMetadata,
        layer: object,
    ) -> tuple[torch.Tensor, None]:
        """Attend to the cache (blocks, tokens of a block, L + R): (requests, N, L) of latents."""
        assert attn_metadata.decode is not None
        queries = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        seen = queries.new_empty(len(queries), self.num_heads, self.latent)
        lengths, tables = attn_metadata.decode.seq_lens.tolist(), attn_metadata.decode.block_table
        for i, (length, table) in enumerate(zip(lengths, tables, strict=True)):
            blocks = table[: -(-length // kv_c_and_k_pe_cache.shape[1])].long()
            rows = kv_c_and_k_pe_cache[blocks].flatten(0, 1)[:length]
            weights = (queries[i] @ rows.T * self.scale).softmax(dim=-1)
            seen[i] = weights @ rows[:, : self.latent]
        return seen, None


class Unpacked(UnquantizedLinearMethod):
    """Keeps a weight that vLLM takes apart once more; its CPU build would pack it and drop it."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        layer.cpu_linear = torch.nn.functional.linear

"""What vLLM's own attention over a latent KV cache lacks on CPUs, for 0.28.0 and later.

From there on vLLM's CPU platform has a cache and a decode kernel for these models (`cpu_mla.py`).
Its prefill is left to a backend of which none runs on a CPU, and the CPU's linear layer drops the
weight that the attention takes apart. Both are mended here, and the rest is vLLM's. There are no
chunks of context, which vLLM switches off for these models on a CPU.
"""

from __future__ import annotations

import kvfix_prefill
from kvfix_latent import Unpacked
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

assert kvfix_prefill  # what vLLM looks for


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

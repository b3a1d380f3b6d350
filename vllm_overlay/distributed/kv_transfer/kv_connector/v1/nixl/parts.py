# SPDX-License-Identifier: Apache-2.0
"""From 0.20.0 on: which of our kernel blocks are right after they were read in parts.

Of a peer whose kernel blocks hold fewer tokens, a block of ours is read as several of its blocks,
one after the other. Unless tokens are outermost within a block, that is not a block of ours: each
head has its tokens in as many places. The worker sorts that once all has arrived, and clears what
the prompt does not fill. Up to 0.31.0 it does so rightly for a few layouts only:

- Up to 0.25.1 it takes a cache for ``[block, token, head, element]`` with heads outermost within
  a block. So keys and values lie where they have a tensor each (FlashAttention up to 0.22.1). Any
  other number of dimensions is an error out of the worker's step, which ends the engine.
- From 0.26.0 on all caches are ``[block, head, token, element]``, and it takes heads for tokens.
- Latent caches need no sorting. From 0.29.0 on they have a head, and where the last block is not
  full, it is cleared as a whole: the head is taken for the tokens.

From 0.32.0 on it is right for all but pages that hold all scales behind all values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.distributed.kv_transfer.kv_connector import utils
from vllm.v1.kv_cache_interface import MLAAttentionSpec

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlAgentMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.worker import NixlConnectorWorker

_KNOWS_TOKENS = not hasattr(utils, "kv_postprocess_layout_on_receive")
"""The worker finds the tokens in every cache: from 0.32.0 on, where this function is gone."""


def refuse_unsorted_parts(worker: NixlConnectorWorker, peer: NixlAgentMetadata) -> None:
    """Refuse a peer with smaller kernel blocks if ours would be wrong after all was read.

    Raises:
        RuntimeError: see the module.
    """
    if peer.block_size < worker.block_size and not _sorts_parts(worker, peer):
        raise RuntimeError(
            f"NIXL handshake: engine {peer.engine_id} has kernel blocks of {peer.block_size} "
            f"tokens, this engine of {worker.block_size}, which this release of vLLM does not make "
            "of them in a cache like this engine's. Start prefill and decode with the same "
            "--block-size and attention backend."
        )


def _sorts_parts(worker: NixlConnectorWorker, peer: NixlAgentMetadata) -> bool:
    """Whether the release makes blocks of this worker's of what it reads in parts."""
    if worker.use_mla:
        return _KNOWS_TOKENS or not any(
            isinstance(worker._layer_specs.get(name), MLAAttentionSpec) and cache.dim() == 4
            for name, cache in worker.device_kv_caches.items()
        )
    if worker.vllm_config.cache_config.cache_dtype.startswith("nvfp4"):
        return False
    if _KNOWS_TOKENS:
        return True
    if not getattr(worker.transfer_topo, "split_k_and_v", False):  # gone in 0.26.0
        return False
    if worker.use_host_buffer:
        caches, layout = worker.host_xfer_buffers, worker.host_buffer_kv_cache_layout
    else:
        caches, layout = worker.device_kv_caches, worker.kv_cache_layout
    # With `enable_permute_local_kv`, blocks whose heads are outermost go into a cache of the other
    # order. Without it, another layout is refused after this.
    permuted = layout != peer.kv_cache_layout
    return all(_is_sorted(half, permuted) for cache in caches.values() for half in cache)


def _is_sorted(cache: torch.Tensor, permuted: bool) -> bool:
    """Whether keys, or values, are in memory as they are sorted: heads outermost within a block,
    tokens if they are `permuted` as well."""
    if cache.dim() != 4:
        return False
    return cache.shape[2] == 1 or (cache.stride(2) > cache.stride(1)) != permuted

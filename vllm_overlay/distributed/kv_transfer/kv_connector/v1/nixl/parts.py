# SPDX-License-Identifier: Apache-2.0
"""From 0.20.0 on: which of our kernel blocks are right after they came in parts, or permuted.

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

With `enable_permute_local_kv`, blocks of a peer whose heads are outermost go into a cache whose
tokens are, and the worker exchanges the two once all has arrived. Of whole blocks it does so
rightly up to 0.25.1 where keys and values have a tensor each, and raises otherwise; from 0.26.0 to
0.31.0 it takes heads for tokens here too; from 0.32.0 on it is right.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    """Refuse a peer with smaller kernel blocks, or of another layout, if our blocks would be wrong
    after all was read.

    Raises:
        RuntimeError: see the module.
    """
    if peer.block_size < worker.block_size:
        if not _sorts_parts(worker, peer):
            raise RuntimeError(
                f"NIXL handshake: engine {peer.engine_id} has kernel blocks of {peer.block_size} "
                f"tokens, this engine of {worker.block_size}, which this release of vLLM does not "
                "make of them in a cache like this engine's. Start prefill and decode with the "
                "same --block-size and attention backend."
            )
    elif not _permutes(worker, peer):
        raise RuntimeError(
            f"NIXL handshake: engine {peer.engine_id} has a KV cache of layout "
            f"{peer.kv_cache_layout}, this engine one of {_caches(worker)[1]}. This release of "
            "vLLM does not permute blocks rightly in a cache like this engine's "
            "(enable_permute_local_kv). Start prefill and decode with the same "
            "VLLM_KV_CACHE_LAYOUT and attention backend."
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
    caches, layout = _caches(worker)
    # With `enable_permute_local_kv`, blocks whose heads are outermost go into a cache of the other
    # order. Without it, another layout is refused after this.
    permuted = layout != peer.kv_cache_layout
    return all(_is_sorted(half, permuted) for cache in caches.values() for half in cache)


def _caches(worker: NixlConnectorWorker) -> tuple[Mapping[str, torch.Tensor], str]:
    """What peers' blocks are read into, by layer, and its layout."""
    if worker.use_host_buffer:
        return worker.host_xfer_buffers, worker.host_buffer_kv_cache_layout
    return worker.device_kv_caches, worker.kv_cache_layout


def _permutes(worker: NixlConnectorWorker, peer: NixlAgentMetadata) -> bool:
    """Whether whole blocks of this peer's layout end as blocks of this worker's."""
    caches, layout = _caches(worker)
    if (
        _KNOWS_TOKENS
        or worker.use_mla
        or layout == peer.kv_cache_layout
        # The release refuses another layout itself, after this.
        or not worker.kv_transfer_config.enable_permute_local_kv
    ):
        return True
    halves = getattr(worker.transfer_topo, "split_k_and_v", None)  # gone in 0.26.0
    if halves is None:
        return all(map(_is_permuted, caches.values()))
    parts = (part for cache in caches.values() for part in (cache if halves else [cache]))
    return all(_is_sorted(part, permuted=True) for part in parts)


def _is_permuted(cache: torch.Tensor) -> bool:
    """From 0.26.0 on: whether heads that are taken for tokens, and the other way round, end in
    their places all the same. Nothing is said of what is not ``[block, head, token, element]``."""
    if cache.dim() != 4:
        return True
    heads, tokens = cache.shape[1:3]
    if heads == tokens:
        return cache.stride(2) >= cache.stride(1)
    return 1 in (heads, tokens)


def _is_sorted(cache: torch.Tensor, permuted: bool) -> bool:
    """Whether keys, or values, are in memory as they are sorted: heads outermost within a block,
    tokens if they are `permuted` as well."""
    if cache.dim() != 4:
        return False
    return cache.shape[2] == 1 or (cache.stride(2) > cache.stride(1)) != permuted

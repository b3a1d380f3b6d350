# SPDX-License-Identifier: Apache-2.0
"""0.30.0 to 0.32.0: where pages of several layers begin at one address, the longest one is read.

The worker keeps one region for each address, and of its layers the length of one. Layers of other
groups may have longer pages there; what is beyond that length never travels. A block belongs to one
group and its row is at least as long as any of its pages, so that reading more of it than its own
layer has does no harm. Nothing of it is in the handshake: P says the same lengths as on stock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import MambaSpec

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import (
        NixlBaseConnectorWorker,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlAgentMetadata


def note_page(
    worker: NixlBaseConnectorWorker, address: int, length: int, stride: int, spec: object
) -> None:
    """Note what a layer has at an address: bytes of a page, and from one block to the next.

    States are not meant: they are read by descriptors of their own.
    """
    if not isinstance(spec, MambaSpec):
        _pages(worker).setdefault(address, set()).add((length, stride))


def whole_block_len(worker: NixlBaseConnectorWorker, region: int, parts: int = 1) -> int:
    """Return the bytes of each block of a region that are read, in so many equal parts."""
    kept = worker.block_len_per_layer[region]
    if worker._TRANSFER_MODE != "pull" or not _pages(worker):
        return kept // parts
    stride = worker.block_stride_per_layer[region]
    address = worker.kv_caches_base_addr[worker.engine_id][worker.tp_rank][region]
    alike = (length for length, other in _pages(worker).get(address, ()) if other == stride)
    return max(kept, *alike, 0) // parts


def refuse_cut_pages(
    worker: NixlBaseConnectorWorker, said: NixlAgentMetadata, remote_tp_size: int
) -> None:
    """Refuse a peer whose regions of several layers cannot be read whole.

    Raises:
        RuntimeError: its blocks are shorter than ours, or its ranks share the heads otherwise.
    """
    for region, kept in enumerate(worker.block_len_per_layer):
        whole = whole_block_len(worker, region)
        if whole == kept:
            continue
        alike = worker._is_region_replicated(region) or remote_tp_size == worker.world_size
        if alike and said.block_size == worker.block_size and said.block_strides[region] >= whole:
            continue
        raise RuntimeError(
            f"Layers of several groups lie at one address, with pages of up to {whole} bytes of "
            f"which {kept} are in the handshake. Start prefill and decode with the same "
            "--block-size, --tensor-parallel-size and --speculative-config."
        )


def _pages(worker: NixlBaseConnectorWorker) -> dict[int, set[tuple[int, int]]]:
    """The length and stride of what layers have, by its address."""
    known: dict[str, Any] = worker.__dict__
    pages: dict[int, set[tuple[int, int]]] = known.setdefault("_pages_by_address", {})
    return pages

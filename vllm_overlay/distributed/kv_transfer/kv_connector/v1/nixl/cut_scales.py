# SPDX-License-Identifier: Apache-2.0
"""0.21.0 to 0.32.0: pages that have all scales behind all data are read whole, or not at all.

A page of an NVFP4 cache holds the keys' data of all heads, the keys' scales of all heads, and the
same of the values. The bytes of some heads are four pieces of it. With other tensor ranks than P's,
a worker reads one piece of a page, or of its keys and of its values, and takes that for its heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.older import pulls

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlAgentMetadata


def refuse_cut_scales(
    worker: Any,  # noqa: ANN401 - of any release
    peer: NixlAgentMetadata,
    remote_tp_size: int,
) -> None:
    """Refuse a peer of which a pull would read pages in parts, or put pages together of parts,
    where such a part is not what some heads have.

    A latent cache is read whole, whatever its type.

    Raises:
        RuntimeError: a layer's cache is NVFP4, and the peer's ranks hold more heads or fewer.
    """
    if worker.use_mla or not pulls(worker):
        return
    heads, ours = worker.transfer_topo.total_num_kv_heads, worker.transfer_topo.tp_size
    # More ranks than heads hold one each.
    held = max(1, heads // ours)
    theirs = max(1, heads // remote_tp_size)
    if theirs == held or not any(map(_is_nvfp4, worker._layer_specs.values())):
        return
    raise RuntimeError(
        f"NIXL handshake: a rank of engine {peer.engine_id} holds {theirs} KV heads, one of this "
        f"engine {held}, and an NVFP4 cache cannot be cut by heads. Start prefill and decode with "
        f"the same --tensor-parallel-size (now {remote_tp_size} and {ours}), or another "
        "--kv-cache-dtype."
    )


def _is_nvfp4(spec: Any) -> bool:  # noqa: ANN401 - of any release
    """Whether a layer's cache is, or one of those that share a specification."""
    parts = getattr(spec, "kv_cache_specs", None)
    if parts is not None:
        return any(map(_is_nvfp4, parts.values()))
    mode = getattr(spec, "kv_quant_mode", None)  # states have none
    return mode is not None and bool(mode.is_nvfp4)

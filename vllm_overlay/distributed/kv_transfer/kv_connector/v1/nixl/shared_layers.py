# SPDX-License-Identifier: Apache-2.0
"""Up to 0.23.0: layers without a KV cache of their own are nothing to a worker.

Some layers of Gemma 3n, and of Gemma 4 in its small sizes, attend to what an earlier layer has
cached. The model runner gives the connector a cache for each layer, of such a layer the earlier
one's, but the KV-cache groups that the worker was made with name the owners alone. A block of the
owner is read once, and by that all of them have it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.worker import NixlConnectorWorker


def owned_caches(
    worker: NixlConnectorWorker, caches: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the caches of layers that are in a KV-cache group, in their order.

    Before the worker makes anything of them: a layer that shares would have a host buffer into
    which nothing is received, and from which the owner's blocks would be overwritten. And what the
    worker does to received blocks in place, to sort their parts, would be done to them twice.

    Args:
        worker: with the groups.
        caches: of all layers, by name.
    """
    return {name: cache for name, cache in caches.items() if name in worker._layer_specs}

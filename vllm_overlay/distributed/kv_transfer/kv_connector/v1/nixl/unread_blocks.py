# SPDX-License-Identifier: Apache-2.0
"""0.26.0 to 0.26.0: what a read has left as it was in a request's blocks is zeroed.

Where a model keeps states, a block that attention gets may hold what a state left there, which may
read as NaN, and attention does not mask that. So the worker zeroes it, but from 0.26.0 on no block
that KV is loaded into, for fear of erasing what has arrived. Where P has another number of kernel
blocks in a logical block, a prompt's last blocks have room for other numbers of them, and the read
ends with the shorter list. What ours has behind it is as it was. From 0.27.0 on upstream's worker
zeroes that after the receive.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import MambaSpec

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.utils import BlockIds
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import (
        NixlBaseConnectorWorker,
    )


def zero_unread(worker: NixlBaseConnectorWorker, ours: BlockIds, theirs: BlockIds) -> None:
    """Zero the kernel blocks of a received request that lie behind what was read.

    On the device's queue: behind the steps that run, and before the first of this request. What a
    push has left is not known here, where no block of P's has a name.

    Args:
        worker: of D.
        ours: kernel blocks of the request, by group.
        theirs: P's, from which they were read; none if P has pushed.
    """
    if not worker._has_mamba:
        return  # nothing else leaves NaN
    assert worker.transfer_topo is not None  # noqa: S101 - for mypy: set before any handshake
    for index, read in enumerate(theirs):
        group = worker.kv_cache_config.kv_cache_groups[index]
        unread = ours[index][len(read) :]
        if not unread or issubclass(worker._group_spec_types[index], MambaSpec):
            continue
        for name, cache in worker.device_kv_caches.items():
            if name not in group.layer_names:
                continue
            # As pages lie in memory: the block first.
            regions = worker.transfer_topo.get_transfer_cache_regions(cache, group.kv_cache_spec)
            for region in regions:
                for run in _runs(unread):
                    region[run].zero_()


def _runs(ids: Sequence[int]) -> Iterator[slice]:
    """Ascending `ids` as slices: one kernel launch for each, not for each id."""
    for _, run in groupby(enumerate(ids), lambda pair: pair[1] - pair[0]):
        blocks = [block for _, block in run]
        yield slice(blocks[0], blocks[-1] + 1)

"""A rank's KV caches as an attention kernel sees them: one cell for each token, head, K and V."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from vllm.v1.kv_cache_interface import MLAAttentionSpec, SlidingWindowSpec

from tests.simulation.text import Numbers, number
from tests.support.nixl_release import NixlConnectorWorker
from tests.support.nixl_worker import BESIDE
from tests.support.stand_in_model import HEADS


class Cells:
    """The cells of one rank.

    Attributes:
        windows: for each KV-cache group how many tokens back its layers look; infinitely far if
            they look at all.
    """

    def __init__(self, worker: NixlConnectorWorker, rank: int, block_size: int) -> None:
        self._block = block_size
        self._layers: list[list[tuple[Numbers, Numbers]]] = []
        self.windows: list[float] = []
        for group in worker.kv_cache_config.kv_cache_groups:
            spec = group.kv_cache_spec
            # Every rank holds all of a latent cache, and its share of the heads of any other.
            shared = isinstance(spec, MLAAttentionSpec)
            first = 0 if shared else rank * spec.num_kv_heads % HEADS
            window = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else math.inf
            self.windows.append(window)
            self._layers.append(
                [
                    _layer(worker.device_kv_caches[name], first, i, len(self._layers))
                    for i, name in enumerate(group.layer_names)
                ]
            )

    def write(self, group: int, table: list[int], start: int, kv: Numbers) -> None:
        """Write the KV of tokens from position `start` on; `table` are the request's blocks."""
        blocks, slots = self._places(table, start, len(kv))
        for view, marks in self._layers[group]:
            view[blocks, slots] = kv[:, None, None, None] ^ marks

    def wrong(
        self, group: int, table: list[int], start: int, kv: Numbers
    ) -> tuple[int, int, int] | None:
        """Position, block and number of the first token from `start` whose KV is not `kv`."""
        blocks, slots = self._places(table, start, len(kv))
        for view, marks in self._layers[group]:
            found = view[blocks, slots] ^ marks
            bad = (found != kv[:, None, None, None]).any(axis=(1, 2, 3))
            if bad.any():
                at = int(bad.argmax())
                odd = found[at][found[at] != kv[at]]
                return start + at, int(blocks[at]), int(odd[0])
        return None

    def _places(self, table: list[int], start: int, count: int) -> tuple[Any, Any]:
        positions = np.arange(start, start + count)
        return np.asarray(table)[positions // self._block], positions % self._block


def _layer(cache: Any, first: int, layer: int, group: int) -> tuple[Numbers, Numbers]:  # noqa: ANN401
    """A layer's cells by block, token, head, K and V, part; and what marks the last three.

    `first` is the head with which the rank begins.
    """
    array = cache.numpy()
    if array.ndim == 3:  # latent: blocks, tokens, elements
        view = array[:, :, None, None, :]
    elif array.ndim == 4 and BESIDE:  # blocks, heads, tokens, elements of K and then V
        view = array.reshape(*array.shape[:3], 2, -1).transpose(0, 2, 1, 3, 4)
        if not np.shares_memory(view, array):
            raise ValueError("the cache cannot be looked at in place")
    else:  # K and V, blocks, tokens, heads, elements
        view = array.transpose(1, 2, 3, 0, 4)
    cells = view.view(np.uint64)
    heads, sides, parts = cells.shape[2:]
    marks = np.array(
        [
            [[number(group, layer, first + h, s, p) for p in range(parts)] for s in range(sides)]
            for h in range(heads)
        ],
        dtype=np.uint64,
    )
    return cells, marks

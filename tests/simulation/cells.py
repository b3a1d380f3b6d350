"""A rank's KV caches as a model's kernels see them: a cell for each token, head, K and V.

A recurrent state has cells too, which hold what is made of the last token that it has seen; in
which of its blocks they are the model runner knows (`slots.py`).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_cache_interface import MambaSpec, MLAAttentionSpec, SlidingWindowSpec

from tests.simulation.text import Numbers, number
from tests.support.nixl_release import NixlConnectorWorker
from tests.support.nixl_worker import BESIDE, states_in
from tests.support.stand_in_model import HEADS


class Cells:
    """The cells of one rank.

    Attributes:
        windows: for each KV-cache group how many tokens back its layers look; infinitely far if
            they look at all.
        states: the groups that keep states.
    """

    def __init__(self, worker: NixlConnectorWorker, rank: int) -> None:
        self._layers: list[list[tuple[Numbers, Numbers]]] = []
        self.windows: list[float] = []
        self.states: set[int] = set()
        self._blocks: list[int] = []
        groups = worker.kv_cache_config.kv_cache_groups
        has_states = any(isinstance(group.kv_cache_spec, MambaSpec) for group in groups)
        for group in groups:
            spec = group.kv_cache_spec
            self._blocks.append(spec.block_size)
            caches = [worker.device_kv_caches[name] for name in group.layer_names]
            if isinstance(spec, MambaSpec):
                states = [state for cache in caches for state in states_in(cache, spec)]
                self.states.add(len(self._layers))
                self.windows.append(math.inf)
                self._layers.append([_state(state, rank, i) for i, state in enumerate(states)])
                continue
            # Every rank holds all of a latent cache, and its share of the heads of any other.
            shared = isinstance(spec, MLAAttentionSpec)
            first = 0 if shared else rank * spec.num_kv_heads % HEADS
            window = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else math.inf
            self.windows.append(window)
            self._layers.append(
                [
                    _layer(cache, first, i, len(self._layers), beside_states=has_states)
                    for i, cache in enumerate(caches)
                ]
            )

    def write(self, group: int, table: list[int], start: int, kv: Numbers) -> None:
        """Write the KV of tokens from position `start` on; `table` are the request's blocks."""
        blocks, slots = self._places(group, table, start, len(kv))
        for view, marks in self._layers[group]:
            view[blocks, slots] = kv[:, None, None, None] ^ marks

    def wrong(
        self, group: int, table: list[int], start: int, kv: Numbers
    ) -> tuple[int, int, int] | None:
        """Position, block and number of the first token from `start` whose KV is not `kv`."""
        blocks, slots = self._places(group, table, start, len(kv))
        for view, marks in self._layers[group]:
            found = view[blocks, slots] ^ marks
            bad = (found != kv[:, None, None, None]).any(axis=(1, 2, 3))
            if bad.any():
                at = int(bad.argmax())
                odd = found[at][found[at] != kv[at]]
                return start + at, int(blocks[at]), int(odd[0])
        return None

    def write_state(self, group: int, block: int, kv: np.uint64) -> None:
        """Write the state after a token."""
        self.write(group, [block], 0, np.array([kv], dtype=np.uint64))

    def copy(self, source: int, target: int) -> None:
        """Copy a block, whichever group's it is."""
        for group in range(len(self._layers)):
            self.copy_state(group, source, target)

    def copy_state(self, group: int, source: int, target: int) -> None:
        """Copy a state from one block to another."""
        for view, _ in self._layers[group]:
            view[target] = view[source]

    def wrong_state(
        self, group: int, block: int, position: int, kv: Numbers
    ) -> tuple[int, int, int] | None:
        """As `wrong`, of a state, which should be the one after the token at `position`."""
        wrong = self.wrong(group, [block], 0, kv)
        return wrong and (position, *wrong[1:])

    def _places(self, group: int, table: list[int], start: int, count: int) -> tuple[Any, Any]:
        positions, tokens = np.arange(start, start + count), self._blocks[group]
        return np.asarray(table)[positions // tokens], positions % tokens


def _layer(
    cache: Any,  # noqa: ANN401 - a tensor
    first: int,
    layer: int,
    group: int,
    *,
    beside_states: bool,
) -> tuple[Numbers, Numbers]:
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
    elif beside_states:  # blocks, K and V, heads, tokens, elements
        view = array.transpose(0, 3, 2, 1, 4)
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


def _state(state: torch.Tensor, rank: int, number_of: int) -> tuple[Numbers, Numbers]:
    """The same of a part of a layer's states: by block, once the token, head and side, and place.

    Ranks have different shares of it, so a state is only right at the rank that it is of.
    """
    array = state.numpy()
    flat = array.reshape(len(array), -1)
    if not np.shares_memory(flat, array):
        raise ValueError("the states cannot be looked at in place")
    cells = flat.view(np.uint64)[:, None, None, None, :]
    places = range(cells.shape[-1])
    return cells, np.array([[[number(rank, number_of, i) for i in places]]], dtype=np.uint64)

"""57662: layers of several groups that share an address arrive whole, however long their pages.

A model with compressors (DeepSeek V4.1) keeps a ring of raw states for each request, beside latent
caches. The release's own planner lays the groups over one another, so that the first layers of all
of them begin at one address, with pages of their own lengths.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import msgspec
import pytest
import torch
from vllm.v1 import kv_cache_interface as interface

from tests.support.harness import building
from tests.support.nixl_release import NixlAgentMetadata, NixlConnectorWorker
from tests.support.nixl_worker import (
    allocate,
    attempt,
    make_kv_cache_config,
    make_vllm_config,
    nixl_of,
    rank_key,
    receive,
    surroundings,
)
from tests.support.release import since

RINGS = since("0.30.0")
"""The release reads such models over NIXL. Before, one latent cache stands for all."""

LAYOUT = "BLNHC"
"""Of the caches: all layers' pages of a block, one after the other. No other takes such models."""


def layers(block_size: int, *, windows_first: bool) -> dict[str, Any]:
    """What the layers of such a model keep, five of them: the last has a window only."""

    def spec(name: str, **fields: Any) -> Any:  # noqa: ANN401 - what a layer keeps
        kind = getattr(interface, name)
        known = {field.name for field in dataclasses.fields(kind)}
        return kind(num_kv_heads=1, **{k: v for k, v in fields.items() if k in known})

    latent = {"dtype": torch.uint8, "alignment": 576}
    halved = {"block_size": block_size, "tokens_per_state": 2, "compress_ratio": 2}
    ring = {"block_size": 8, "head_size_v": 0, "dtype": torch.float32}
    window = {"block_size": 64, "sliding_window": 128, "head_size": 584}
    kept: dict[str, Any] = {}
    for layer in range(5):
        name = f"layers.{layer}.attn"
        own = {f"{name}.swa_cache": spec("SlidingWindowMLASpec", **window, **latent)}
        compressed = {
            name: spec("MLAAttentionSpec", head_size=584, **halved, **latent),
            f"{name}.indexer.k_cache": spec("MLAAttentionSpec", head_size=132, **halved, **latent),
            f"{name}.indexer.compressor.state_cache": spec(
                "CircularBufferSpec", head_size=256, **ring
            ),
            f"{name}.compressor.state_cache": spec("CircularBufferSpec", head_size=1024, **ring),
        }
        both = [own, compressed] if windows_first else [compressed, own]
        for part in both if layer < 4 else [own]:
            kept |= part
    return kept


@building("the caches of a model with compressors")
def caches(config: Any, kept: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:  # noqa: ANN401
    """What the release's planner makes of the layers, and their caches."""
    if kept is None:
        planned = make_kv_cache_config(mla=True)
        return planned, allocate(planned, 16)
    planner = "kv_cache_planning" if _has("kv_cache_planning") else "kv_cache_utils"
    planning = importlib.import_module(f"vllm.v1.core.{planner}")
    groups = planning.get_kv_cache_groups(config, kept)
    planned = planning.get_kv_cache_config_from_groups(config, groups, 16 << 20)
    worker_utils = importlib.import_module("vllm.v1.worker.utils")
    layout = interface.KVCacheLayout[LAYOUT]
    return planned, worker_utils.allocate_kv_cache(planned, torch.device("cpu"), layout, None)


def _has(module: str) -> bool:
    return importlib.util.find_spec(f"vllm.v1.core.{module}") is not None


def engine(
    name: str, block_size: int, windows_first: bool
) -> tuple[NixlConnectorWorker, dict[str, Any]]:
    """A worker, and the caches of its layers."""
    config = make_vllm_config(mla=True, hybrid=RINGS, block_size=block_size if RINGS else 16)
    if RINGS:
        config.cache_config.kv_cache_layout = LAYOUT
    kept = layers(block_size, windows_first=windows_first) if RINGS else None
    planned, views = caches(config, kept)
    ranks: dict[str, Any] = {
        "get_tensor_model_parallel_rank": lambda: 0,
        "get_tensor_model_parallel_world_size": lambda: 1,
    }
    with surroundings(mla=True, **ranks):
        worker = NixlConnectorWorker(config, name, planned)
        worker.register_kv_caches(views)
    return worker, views


def arrived(block_size: int, windows_first: bool) -> dict[str, bool]:
    """Let D read a block of each group.

    Returns:
        for each layer, whether its block is the same on both sides afterwards.
    """
    (p, theirs), (d, ours) = (engine(name, block_size, windows_first) for name in "PD")
    payload = p.xfer_handshake_metadata
    assert payload is not None
    said = msgspec.msgpack.decode(payload.agent_metadata_bytes, type=NixlAgentMetadata)
    d._remote_agents["P"] = {rank_key(0): d.add_remote_agent(said, 0, 1)}
    groups = p.kv_cache_config.kv_cache_groups
    blocks = {name: 1 + i for i, group in enumerate(groups) for name in group.layer_names}
    chance = torch.Generator().manual_seed(0)
    for name, block in blocks.items():
        page = theirs[name][block].view(torch.uint8)
        page.copy_(torch.randint(256, page.shape, generator=chance, dtype=torch.uint8))
    named = [[1 + i] for i in range(len(groups))]
    receive(d, local_blocks=named, remote_blocks=named)
    for read in nixl_of(d).reads:
        nixl_of(d).move(read)
    return {
        name: torch.equal(ours[name][b].view(torch.uint8), theirs[name][b].view(torch.uint8))
        for name, b in blocks.items()
    }


@pytest.mark.parametrize(("block_size", "windows_first"), [(256, False), (128, True)])
def test_every_layers_block_arrives_whole(block_size: int, windows_first: bool) -> None:
    found = attempt(arrived, block_size, windows_first)
    assert isinstance(found, dict), found
    assert found == dict.fromkeys(found, True)

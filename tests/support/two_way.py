"""Transfers in both directions, from 0.21.0 on: P also reads what D keeps of its requests.

A second turn of a conversation goes to P with what D has answered to the first. Releases before
that compute it, and keep nothing.
"""

from __future__ import annotations

from typing import Any, TypeVar

from tests.support.decode_engine import DecodeEngine
from tests.support.nixl_worker import peer_port

TWO_WAY = "vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.two_way"
"""The overlay's module for them, which a patched release has if it has them."""

_Engine = TypeVar("_Engine", bound=DecodeEngine)


def two_way(engine: _Engine, keeps: float = 100.0) -> _Engine:
    """Set an engine up for it; as D it keeps the blocks of a request for `keeps` seconds."""
    side = vars(engine.scheduler.connector)["connector_scheduler"]
    vars(side).update(
        is_bidirectional_kv_xfer_enabled=True,
        kv_recompute_threshold=0,
        decoder_kv_blocks_ttl=keeps,
    )
    config: Any = engine.worker.vllm_config.kv_transfer_config
    config.kv_connector_extra_config["bidirectional_kv_xfer"] = True
    return engine


def second_turn(blocks: list[list[int]], tokens: int) -> dict[str, Any]:
    """What P is sent for a second turn: D keeps the KV of so many tokens in these blocks.

    Whoever is read from is called P in `tests.support`.
    """
    return {
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "remote_block_ids": blocks,
        "remote_num_tokens": tokens,
        "remote_engine_id": "P",
        "remote_request_id": "turn-1",
        "remote_host": "127.0.0.1",
        "remote_port": peer_port("P"),
        "tp_size": 1,
    }

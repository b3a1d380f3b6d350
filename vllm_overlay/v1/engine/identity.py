# SPDX-License-Identifier: Apache-2.0
"""Up to 0.23.0: the engine id by which a data-parallel rank goes in KV transfers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def take_engine_id(vllm_config: VllmConfig, dp_rank: int) -> None:
    """Make the engine id in a rank's own configuration one that no other rank has.

    All ranks may be started with the same id: an operator has set it, or Ray hands each of them a
    copy of one configuration. The form is vLLM's own, from 0.24.0 on and with Ray from 0.21.0 on.

    Args:
        vllm_config: of this rank alone, with the id as it was set.
        dp_rank: its rank among those of all nodes.
    """
    config = vllm_config.kv_transfer_config
    if config is not None:
        config.engine_id = f"{config.engine_id}_dp{dp_rank}"

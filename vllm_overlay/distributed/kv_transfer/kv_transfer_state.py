# SPDX-License-Identifier: Apache-2.0
"""Up to 0.23.0: what hooks call where a worker process sets up its KV connector."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.distributed import parallel_state
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# A child of vLLM's own logger, the one that it gives a handler.
logger = init_logger(f"vllm.{__name__}")


def _sync_engine_id_across_tp(vllm_config: VllmConfig) -> None:
    """Give every rank of an engine the engine id of the engine's first rank.

    Each node that starts an engine makes up an id of its own, while the scheduler announces the
    one of the first node. The first rank has it from there: it runs on the scheduler's node,
    under its configuration. Tensor ranks of the first stage learn it first, then the
    other context and pipeline ranks; data-parallel replicas are engines of their own, and none
    of these groups spans two of them.

    Every rank of the engine must call this, before its connector is created: the connector
    keeps the id. Where an engine has one rank, or all have the id already, nothing changes.
    """
    config = vllm_config.kv_transfer_config
    if config is None:
        return
    parallel = vllm_config.parallel_config
    engine_id = parallel_state.get_tp_group().broadcast_object(config.engine_id, src=0)
    if parallel.prefill_context_parallel_size > 1:
        engine_id = parallel_state.get_pcp_group().broadcast_object(engine_id, src=0)
    if parallel.pipeline_parallel_size > 1:
        engine_id = parallel_state.get_pp_group().broadcast_object(engine_id, src=0)
    if engine_id != config.engine_id:
        logger.info(
            "KV transfer: this rank takes its engine's id %s in place of its own %s",
            engine_id,
            config.engine_id,
        )
        config.engine_id = engine_id

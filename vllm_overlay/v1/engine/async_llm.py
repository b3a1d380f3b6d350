# SPDX-License-Identifier: Apache-2.0
"""How the API server's engine client tells the engine core about a rejected request."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from vllm.sampling_params import SamplingParams
from vllm.utils import random_uuid
from vllm.v1.engine import EngineCoreRequest

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine.core_client import EngineCoreClient


class KVTransferRejecter:
    """A base for `AsyncLLM`."""

    vllm_config: VllmConfig
    engine_core: EngineCoreClient

    async def notify_kv_transfer_request_rejected(
        self,
        request_id: str,
        kv_transfer_params: dict[str, Any],
        *,
        data_parallel_rank: int | None = None,
    ) -> None:
        """Send the engine core a stand-in for the rejected request, to be aborted at once.

        Aborting it runs the connector's own clean-up, which tells the prefill server. Which
        engine does that is of no matter to the prefill server, so a rank that does not exist
        (perhaps the very reason for the rejection) is dropped.

        Raises:
            EngineDeadError: the engine core is gone.
        """
        await self.engine_core.add_request_async(
            EngineCoreRequest(
                # Clients choose their ids. Two stand-ins under one name would be one to the
                # scheduler, and the second prefill server would never hear.
                request_id=f"{request_id}-rejected-{random_uuid()}",
                prompt_token_ids=[0],
                mm_features=None,
                sampling_params=SamplingParams(
                    max_tokens=1, extra_args={"kv_transfer_params": dict(kv_transfer_params)}
                ),
                pooling_params=None,
                arrival_time=time.time(),
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=self._existing_rank(data_parallel_rank),
                abort_immediately=True,
            )
        )

    def _existing_rank(self, rank: int | None) -> int | None:
        parallel = self.vllm_config.parallel_config
        ranks = (
            parallel.data_parallel_size_local
            if parallel.local_engines_only
            else parallel.data_parallel_size
        )
        return rank if rank is not None and 0 <= rank < ranks else None

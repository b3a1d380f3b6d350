# SPDX-License-Identifier: Apache-2.0
"""All releases: what every engine client offers beyond vLLM's own protocol class."""

from __future__ import annotations

from functools import cache
from typing import Any

from vllm.logger import init_logger

logger = init_logger(f"vllm.{__name__}")


class KVTransferNotifier:
    """A base for `EngineClient`: it can be told of a request that will never reach the engine.

    What it does then is said by `vllm_overlay.v1.engine.async_llm.AsyncKVTransferNotifier`.

    A plain method, not an abstract one: engine clients that live outside vLLM do not have it and
    must go on working. Theirs then keep what they did before, with one line in the log.
    """

    async def notify_kv_transfer_request_rejected(
        self,
        request_id: str,
        kv_transfer_params: dict[str, Any],
        *,
        data_parallel_rank: int | None = None,
    ) -> None:
        """Have the KV connector release what a rejected request still holds on its peer.

        Args:
            request_id: names the request in logs; need not be unique.
            kv_transfer_params: as the client sent them.
            data_parallel_rank: the engine that the client asked for, if it asked for one.
        """
        _say_once(type(self).__name__)


@cache
def _say_once(client: str) -> None:
    logger.warning(
        "%s cannot tell a prefill server about rejected requests; "
        "their KV blocks stay until the prefill server's own timeout.",
        client,
    )

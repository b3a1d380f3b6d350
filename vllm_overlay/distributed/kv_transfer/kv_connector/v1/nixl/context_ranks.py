# SPDX-License-Identifier: Apache-2.0
"""0.26.0 to 0.28.0: of the ranks that prefill a context in parallel, one serves what they all hold.

Each keeps the KV of the whole prompt, and goes by the same pipeline and tensor rank. P hands out
the handshake of the last one, and D, which knows of no others, reads from that one and tells it;
P's scheduler waits for all. Upstream's 0.29.0 hands out the first one's, and counts no other.
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING

from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import (
    NixlPullConnectorWorker,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
        NixlConnectorMetadata,
        NixlHandshakePayload,
    )
    from vllm.v1.kv_cache_interface import KVCacheConfig


class SilentContextWorker(NixlPullConnectorWorker):  # type: ignore[misc, unused-ignore]
    """The worker of a context rank that no peer reads from: it holds nothing for any."""

    def __init__(
        self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self._sent_elsewhere: set[str] = set()

    @property
    def xfer_handshake_metadata(self) -> NixlHandshakePayload | None:
        """Nothing, so that P hands out what the first context rank says of itself."""
        return None

    @xfer_handshake_metadata.setter
    def xfer_handshake_metadata(self, said: NixlHandshakePayload | None) -> None:
        pass

    def start_load_kv(self, metadata: NixlConnectorMetadata) -> None:
        """Receive as any rank does; what peers may read is theirs at the first context rank."""
        self._sent_elsewhere.update(metadata.reqs_to_send)
        own = copy(metadata)
        own.reqs_to_send, own.reqs_in_batch, own.reqs_not_processed = {}, set(), set()
        super().start_load_kv(own)

    def get_finished(self) -> tuple[set[str], set[str]]:
        """Return requests that are done sending, those at once that are read elsewhere, and done
        receiving."""
        sent, received = super().get_finished()
        sent, self._sent_elsewhere = sent | self._sent_elsewhere, set()
        return sent, received


def of_context_rank(
    kind: type[NixlPullConnectorWorker], vllm_config: VllmConfig
) -> type[NixlPullConnectorWorker]:
    """Return which worker this process needs: `kind`, or one that serves no peer.

    Where context ranks share the KV among them (decode context parallelism), it is `kind`, as on
    stock.
    """
    config = vllm_config.parallel_config
    if config.prefill_context_parallel_size == 1 or config.decode_context_parallel_size > 1:
        return kind
    return kind if parallel_state.get_pcp_group().rank_in_group == 0 else SilentContextWorker

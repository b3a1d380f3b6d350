# SPDX-License-Identifier: Apache-2.0
"""0.30.0 to 0.31.0: which reads `renewal` is about, where the worker itself keeps failed receives.

Everything runs on the worker's main thread.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker

from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.renewal import (
    is_of_the_peer,
    read_failed,
)

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import TransferHandle
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import (
        NixlPullConnectorWorker,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.tp_mapping import ReadSpec

_ReadBlocks = Callable[..., bool]


class RenewsPeers(NixlBaseConnectorWorker):
    """A base for `NixlPullConnectorWorker`: a failed read disconnects its peer."""

    def _handle_failed_transfer(
        self,
        req_id: str,
        handle: TransferHandle | None,
        failed_req_ids: set[str] | None = None,
        *counted: bool,  # whether to count it: from 0.31.0 on
        **named: bool,
    ) -> bool:
        # Without a handle it may be anything; a read that was not even made: `renews_peer`.
        self._read_error = sys.exc_info()[1] if handle is None else None
        # A handle that NIXL keeps comes again in each step. And vLLM's own tests know no peer.
        kept = self.__dict__.setdefault("_kept_handles", set())
        failed = handle is not None and handle not in kept and "_remote_agents" in vars(self)
        read_failed(self, self._recving_metadata.get(req_id) if failed else None)
        released = super()._handle_failed_transfer(
            req_id, handle, failed_req_ids, *counted, **named
        )
        (kept.discard if released else kept.add)(handle)
        return released


def renews_peer(read: _ReadBlocks) -> _ReadBlocks:
    """Have `_read_blocks` disconnect a peer that NIXL refuses to read from.

    It stands next to upstream's own, which answers False for nothing else.
    """

    @functools.wraps(read)
    def wrapper(
        self: NixlPullConnectorWorker,
        read_spec: ReadSpec,
        dst_engine_id: str,
        request_id: str,
        *args: Any,  # noqa: ANN401 - passed on as they are
        **named: Any,  # noqa: ANN401
    ) -> bool:
        posted = read(self, read_spec, dst_engine_id, request_id, *args, **named)
        if not posted and is_of_the_peer(vars(self).pop("_read_error", None)):
            read_failed(self, self._recving_metadata.get(request_id))
        return posted

    return wrapper

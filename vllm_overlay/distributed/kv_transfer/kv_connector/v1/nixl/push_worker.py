# SPDX-License-Identifier: Apache-2.0
"""From 0.24.0 on: what hooks call in a worker that pushes (`NixlPushConnector`).

Everything here runs on the thread that pushes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import (
        NixlPushConnectorWorker,
    )

_Handle = Callable[["NixlPushConnectorWorker", bytes], None]


def drops_what_it_cannot_use(handle: _Handle) -> _Handle:
    """Have `_handle_push_reg_notif` drop a registration that makes no sense here.

    Those that arrived with it have been taken from NIXL already, and would be lost.
    """

    @functools.wraps(handle)
    def wrapper(self: NixlPushConnectorWorker, notif: bytes) -> None:
        try:
            handle(self, notif)
        except Exception as error:
            shown = repr(notif)[:100]
            self._log_failure("registration_unusable", None, error=error, payload=shown)
            self.xfer_stats.record_failed_notification()

    return wrapper

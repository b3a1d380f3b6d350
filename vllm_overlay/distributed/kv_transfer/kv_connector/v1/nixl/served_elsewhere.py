# SPDX-License-Identifier: Apache-2.0
"""From 0.30.0 on: P's scheduler does not wait for context ranks from which nobody reads.

The worker of such a rank says at once that what D may read is sent, as P frees blocks when all
ranks have said so. The connector takes that out of its report again, as 0.29.0 did, which does not
count these ranks: nothing is ever free.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults


def says_what_is_served_elsewhere(
    report: Callable[..., KVConnectorTransferResults],
) -> Callable[..., KVConnectorTransferResults]:
    """Have a connector's `get_transfer_results` say what its worker says at once is sent."""

    @functools.wraps(report)
    def wrapper(self: Any, finished_req_ids: set[str]) -> KVConnectorTransferResults:  # noqa: ANN401
        served = set(self.connector_worker._replicated_pcp_done_sending)
        results = report(self, finished_req_ids)
        results.finished_sending |= served
        return results

    return wrapper

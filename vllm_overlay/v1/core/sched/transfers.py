# SPDX-License-Identifier: Apache-2.0
"""All releases: a finished request's blocks are free when the last transfer that uses them is over.

A request that leaves while its prompt's KV is still received has its blocks written to until the
worker says that the receive is over. Where a connector saves or sends what finishes (LMCache, an
offloading connector, NIXL on a prefill server), they are read from until it says that of the send.
Both may be under way, in any order: with NIXL and a connector that saves in one `MultiConnector`,
or with one that does both. The scheduler has one flag for the two. It frees the blocks at the first
report, and asserts at the second that it knows the request.

Here each is awaited for itself, where vLLM's own connectors do the work, or what is derived from
NIXL's. Others have learned to live with the one flag: Dynamo's KVBM and LMCache's multi-process
connector leave out the end of a save when they report that of a load. Of a request that such a one
loads the first report frees, as on stock. What nobody awaits frees nothing and ends nothing: it is
logged.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from vllm_overlay.distributed.kv_transfer.fix_counts import Acted, count
from vllm_overlay.logging_utils.bounded_log import BoundedLog
from vllm_overlay.plugins import is_plugins

if TYPE_CHECKING:
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = BoundedLog(init_logger(f"vllm.{__name__}"))

_OWN = "vllm.distributed.kv_transfer.kv_connector.v1."
"""Where vLLM has its connectors."""

_OF_OTHERS = ("base", "lmcache", "flexkv")
"""What is there of everybody's, and what only calls the packages of others."""


class Transfer(Enum):
    """What a connector does with a request's blocks while the request does not run."""

    RECEIVE = "receiving"
    SEND = "sending"


class AwaitsTransfers:
    """A base for the scheduler: it awaits every transfer of a finished request."""

    requests: dict[str, Request]
    connector: Any
    # Of the request that finishes; nobody says so where a plugin has its own `_connector_finished`.
    _all_ends_come = False

    @functools.cached_property
    def _under_way(self) -> WeakKeyDictionary[Request, set[Transfer]]:
        """Finished requests that keep their blocks, and for what."""
        return WeakKeyDictionary()

    def _keeps_blocks(self, request: Request, *, receiving: bool, sending: bool) -> None:
        """Note why the blocks of a request that has finished are not free yet, if they are not."""
        under_way = {Transfer.RECEIVE: receiving, Transfer.SEND: sending}
        if self._all_ends_come and any(under_way.values()):
            self._under_way[request] = {transfer for transfer, is_so in under_way.items() if is_so}

    def _ends_transfers(self, reported: KVConnectorOutput) -> KVConnectorOutput:
        """Return the report, with those requests only for which there is something to do.

        They are requests that wait for what was received, and finished ones whose blocks nothing
        uses any more; each of these once.
        """
        if not reported.finished_recving and not reported.finished_sending:
            return reported  # nearly always
        received = {
            req_id
            for req_id in reported.finished_recving or ()
            if self._is_last(req_id, Transfer.RECEIVE)
        }
        sent = {
            req_id
            for req_id in reported.finished_sending or ()
            if req_id not in received and self._is_last(req_id, Transfer.SEND)
        }
        return dataclasses.replace(reported, finished_recving=received, finished_sending=sent)

    def _is_last(self, req_id: str, transfer: Transfer) -> bool:
        """Whether the scheduler is to act on the end of a transfer."""
        request = self.requests.get(req_id)
        if request is not None and not request.is_finished():
            waits = request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
            if waits and transfer is Transfer.RECEIVE:
                return True
        elif request is not None:
            under_way = self._under_way.get(request)
            if under_way is None:
                return True  # it was finished by somebody who does not say what for
            if transfer in under_way:
                under_way.remove(transfer)
                return not under_way
        count(Acted.UNAWAITED_END)
        log.warning(
            "The KV connector is done %s for request %s, which the scheduler does not await (%s).",
            transfer.value,
            req_id,
            "it is gone" if request is None else request.status.name,
        )
        return False


def looks_who_loads(finish: Callable[..., Any]) -> Callable[..., Any]:
    """Have `_connector_finished` look who loads the request, before a `MultiConnector` forgets."""

    @functools.wraps(finish)
    def wrapper(self: AwaitsTransfers, request: Request) -> Any:  # noqa: ANN401 - as upstream's
        if self.connector is not None:
            self._all_ends_come = _reports_each(self.connector, request.request_id)
        return finish(self, request)

    return wrapper


def _reports_each(connector: object, req_id: str) -> bool:
    """Whether who loads a request, or could have, reports the end of each of its transfers."""
    # Here: whoever imports that first has the scheduler imported on the way.
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    if not isinstance(connector, MultiConnector):
        return _is_vllms(type(connector))  # type: ignore[arg-type, unused-ignore]
    loader = connector._requests_to_connector.get(req_id)
    among = connector._connectors if loader is None else [connector._connectors[loader]]
    return all(_reports_each(one, req_id) for one in among)


@functools.cache
def _is_vllms(kind: type) -> bool:
    """Whether connectors of a kind are vLLM's own; or a plugin's, but derived from NIXL's."""
    modules = (one.__module__ for one in kind.__mro__)
    own = [name.removeprefix(_OWN) for name in modules if name.startswith(_OWN)]
    if is_plugins(kind):
        return any(name.startswith("nixl") for name in own)
    return any(not name.startswith(_OF_OTHERS) for name in own)

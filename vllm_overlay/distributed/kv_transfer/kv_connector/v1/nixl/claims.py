# SPDX-License-Identifier: Apache-2.0
"""All releases: which request uses the blocks that a peer keeps: the first that asks.

The first and no other, ever. A prefill server frees a request's blocks as soon as it hears that
somebody has read them or that nobody will. `kv_transfer_params` are not used up by that: a client
or a router may send them again, after a refusal, a lost connection, an aborted request. By then the
blocks hold another prompt. So the engine core remembers for which of its requests the blocks of
each of the peer's requests are; whoever comes later computes its prompt.

Also after a receive that failed. What it has read P has heard of, and would count with what is read
later: it would free the blocks too early, and could not tell the two when it is asked (K20).

The claim is made when a request is added to the scheduler, which one thread does, one request
after the other. A stand-in for a refused request (`vllm_overlay.v1.engine.stand_in`) is such a
request: it claims what it then gives up.
"""

from __future__ import annotations

import functools
import time
from enum import Enum
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm import envs
from vllm.logger import init_logger

from vllm_overlay.distributed.kv_transfer.fix_counts import Acted, count
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.params import (
    asks_for_blocks,
    of_transfer,
    printable,
    without_unread,
)
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.present import connectors_in
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.scheduler import reads_back
from vllm_overlay.logging_utils.bounded_log import BoundedLog
from vllm_overlay.plugins import is_plugins

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

log = BoundedLog(init_logger(f"vllm.{__name__}"))

MAX_CLAIMS = 2**17
"""Claims that are remembered; about 260 bytes each, 35 MB when there are as many.

An engine core that serves 270 requests a second fills this in 480 s, the longest that a prefill
server keeps blocks by default; what is older than that can be forgotten (see `Claims`)."""


class Source(NamedTuple):
    """The request, on the engine that computed it, whose blocks are offered."""

    engine_id: str
    request_id: str


def source_of(params: object) -> Source | None:
    """Whose blocks these `kv_transfer_params` ask for; None if they ask for nobody's."""
    return _source_in(params) if isinstance(params, dict) and asks_for_blocks(params) else None


def _source_in(params: object) -> Source | None:
    """Whose blocks these are about, though NIXL takes the role out of them as it starts to read."""
    if not isinstance(params, dict):
        return None
    engine_id, request_id = params.get("remote_engine_id"), params.get("remote_request_id")
    if not isinstance(engine_id, str) or not isinstance(request_id, str):
        return None
    return Source(engine_id, request_id)


class Claim(Enum):
    """The answer to a request that wants to use blocks."""

    GRANTED = "they are this request's, from now on"
    HELD = "they are this request's, and were before"
    TAKEN = "they were another request's"
    UNRECORDED = "nobody knows; there is no room to remember this one"


class Claims:
    """For which request the blocks of each source are; the first claimant keeps them.

    Once full it forgets the oldest claim for each new one, but none that is younger than `lease`
    seconds: so long may the peer still have the blocks for a second reader to find, so long must
    that one be turned away. When all are younger, new ones go unrecorded.

    Attributes:
        complete: every claim ever made is on record.
    """

    def __init__(self, lease: float, capacity: int = MAX_CLAIMS) -> None:
        self.complete = True
        self._lease, self._capacity = lease, capacity
        self._claims: dict[bytes, tuple[bytes, float]] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._claims)

    def claim(self, source: Source, claimant: str) -> Claim:
        """Ask for the blocks of `source`."""
        key, name, now = _digest(*source), _digest(claimant), time.monotonic()
        known = self._claims.get(key)
        if known is not None:
            return Claim.HELD if known[0] == name else Claim.TAKEN
        if len(self._claims) >= self._capacity:
            self.complete = False
            oldest = next(iter(self._claims))
            if now - self._claims[oldest][1] < self._lease:
                return Claim.UNRECORDED
            del self._claims[oldest]
        self._claims[key] = (name, now)
        return Claim.GRANTED


def _digest(*ids: str) -> bytes:
    """Clients choose ids, of any length; what is kept of them has a fixed one."""
    parts = [part.encode(errors="surrogatepass") for part in ids]
    sizes = b"".join(len(part).to_bytes(8, "little") for part in parts)
    return blake2b(sizes + b"".join(parts), digest_size=16).digest()


class ClaimsBlocks:
    """A base for NIXL's connector for pulling: it takes stand-ins, and has the claims."""

    connector_scheduler: Any  # the class has another name from 0.24.0 on

    @functools.cached_property
    def claims(self) -> Claims:
        """The claims of this engine core; for the scheduler's side."""
        # Which of these a release has, and for which role, differs; the longest is right for all.
        leases: list[object] = [
            getattr(envs, "VLLM_NIXL_ABORT_REQUEST_TIMEOUT", 0),  # up to 0.21.0
            getattr(self.connector_scheduler, "_kv_lease_duration", 0),  # from 0.22.0 on
            getattr(self.connector_scheduler, "decoder_kv_blocks_ttl", 0),
        ]
        # One is the operator's, and on stock nobody looks at it where D keeps no blocks.
        return Claims(max(lease for lease in leases if isinstance(lease, int | float)))


def claiming_connector(connector: KVConnectorBase_V1 | None) -> ClaimsBlocks | None:
    """The connector, or the first of several in one, that has claims.

    A plugin's has none, though it is derived from one: Dynamo's has the `n` samples of a prompt
    read the blocks of one request, and tells P how many they are.
    """
    among = (one for one in connectors_in(connector) if isinstance(one, ClaimsBlocks))
    return next((one for one in among if not is_plugins(type(one))), None)


def claim_offered(scheduler: Scheduler, request: Request) -> None:
    """Claim what a request's parameters offer, or take the offer out of them."""
    connector = claiming_connector(scheduler.connector)
    if connector is None:
        return
    back = reads_back(getattr(connector, "connector_scheduler", None))
    source = source_of(without_unread(request.kv_transfer_params, reads_back=back))
    if source is None:
        return
    if getattr(request, "abort_immediately", False):  # it is there only to give the blocks up
        usable = may_release(scheduler, source, request.request_id)
    else:
        claim = connector.claims.claim(source, request.request_id)
        usable = claim is not Claim.TAKEN and (
            # Further input to an open session comes under its id. So does a request that is sent
            # again, where the ids of clients are used as they are.
            claim is not Claim.HELD or request.request_id in scheduler.requests
        )
    if not usable:
        request.kv_transfer_params = _without_offer(request.kv_transfer_params)
        count(Acted.USED_TWICE)
        log.warning(
            "Request %s: the KV blocks of request %s on engine %s are or were another request's. "
            "They are not used again; a prompt is computed here.",
            printable(request.request_id),
            printable(source.request_id),
            printable(source.engine_id),
        )


def may_release(scheduler: Scheduler, source: Source, claimant: str) -> bool:
    """Whether `claimant` may give up the blocks of `source`: nobody else uses or used them.

    From then on nobody on this engine core will. False where the connector is not known to have
    claims, or to know what to do with a request that only gives blocks up.
    """
    connector = claiming_connector(scheduler.connector)
    if connector is None:
        return False
    if connector.claims.claim(source, claimant) not in (Claim.GRANTED, Claim.HELD):
        return False
    # Where a claim may be missing, whoever still waits or reads is asked himself.
    return connector.claims.complete or not any(
        _source_in(request.kv_transfer_params) == source for request in scheduler.requests.values()
    )


def _without_offer(params: Any) -> dict[str, Any] | None:  # noqa: ANN401 - a checked dict
    """A prefill for somebody else stays one. Other connectors' settings stay as well."""
    if params.get("do_remote_decode"):
        return {**params, "do_remote_prefill": False, "remote_block_ids": None}
    return {name: value for name, value in params.items() if not of_transfer(name)} or None

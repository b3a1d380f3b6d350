# SPDX-License-Identifier: Apache-2.0
"""All releases: what peers have sent a worker, without what cannot be read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from vllm.logger import init_logger

from vllm_overlay.logging_utils.bounded_log import BoundedLog

log = BoundedLog(init_logger(f"vllm.{__name__}"))

_Worker = Any
"""`NixlConnectorWorker`; from 0.24.0 on what those that pull and those that push are made of."""


def notifications(
    worker: _Worker, *others: bytes, fit: Callable[[int], object] = lambda ranks: None
) -> Iterable[list[bytes]]:
    """Return what peers have sent since the last call, without what cannot be read.

    What begins like one of `others` is somebody else's to read. `fit` raises for a number of
    ranks that this worker cannot serve. Who has read what is noted for the worker's next report,
    but not where `others` are told the same way: blocks are pushed there, and in another thread.
    """
    try:
        arrived = worker.nixl_wrapper.get_new_notifs()
    except Exception as error:
        worker._log_failure(failure_type="notification_poll_failed", req_id=None, error=error)
        worker.xfer_stats.record_failed_notification()
        return ()
    if not arrived:
        return ()
    return [
        [n for n in sent if n.startswith(others) or _readable(worker, n, peer, fit, not others)]
        for peer, sent in arrived.items()
    ]


def _readable(
    worker: _Worker, notification: bytes, peer: str, fit: Callable[[int], object], noted: bool
) -> bool:
    """Whether it is "<request id>:<ranks that it is from or for>", with ranks that fit.

    Or, since 0.22.0, "HB:<request ids>": a heartbeat, which prolongs leases.
    """
    try:
        text = notification.decode("utf-8")
        if text.startswith("HB:") and hasattr(worker, "_handle_heartbeat"):
            return True
        req_id, said = text.rsplit(":", 1)
        ranks = int(said)
        if ranks < 1:
            raise ValueError(f"{ranks} ranks")
        fit(ranks)
        heard = vars(worker).get("_heard")
        if noted and heard is not None:  # there is a report for it
            heard[req_id] = heard.get(req_id, frozenset()) | {peer}
    except Exception as error:
        log.warning(
            "NIXL transfer failure: notification_unreadable. Agent %.100r sent %.100r: %.100r",
            peer,
            notification,
            error,
        )
        worker.xfer_stats.record_failed_notification()
        return False
    return True

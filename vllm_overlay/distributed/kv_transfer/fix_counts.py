# SPDX-License-Identifier: Apache-2.0
"""All releases: how often which fix has acted in this process, until somebody takes the counts.

They arise in workers, in the engine core and in the API server; the metric is the API server's.
Workers' go with their report to the scheduler, the scheduler's with its statistics to the server
(`vllm_overlay.v1.core.sched.fix_counts`), which has a sink. Where nobody takes them, they stay:
an integer for each member of `Acted` at the most.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from weakref import WeakMethod


class Acted(Enum):
    """What is counted: the fix, and the reason, as the metric's labels have them."""

    READ_REFUSED = "K20", "read_refused"
    PEER_UNCONFIRMED = "K20", "peer_unconfirmed"
    LEASE_ENDED = "K20", "lease_ended_unread"
    PARAMS_REFUSED = "K04", "params_refused"
    PUSH_PARAMS_REFUSED = "K04", "push_params_refused"
    NO_SUCH_RANK = "K04", "no_such_rank"
    NO_HANDSHAKE = "K23", "no_handshake"
    PEER_NOT_ALLOWED = "K17", "peer_not_allowed"
    REJECTION_PASSED_ON = "K05", "rejection_passed_on"
    REJECTION_LOST = "K05", "rejection_lost"
    RECEIVE_FAILED = "K01", "receive_failed"
    UNREAD_TOLD = "K08", "unread_told"
    PEER_MET_ANEW = "55471", "peer_met_anew"
    NOTIFICATION_GIVEN_UP = "K12", "notification_given_up"
    USED_TWICE = "K11", "used_twice"
    FURTHER_READER = "K10", "further_reader"
    UNAWAITED_END = "K13", "unawaited_end"
    RECEIVED_GAVE_WAY = "57104", "received_gave_way"


_Sink = Callable[[Acted, int], None]

_lock = threading.Lock()
_counts: dict[str, int] = {}
_sink: WeakMethod[_Sink] | None = None


def count(acted: Acted) -> None:
    """Count that a fix has acted; from any thread."""
    add({acted.name: 1})


def add(counts: Mapping[str, int]) -> None:
    """Add counts by names of `Acted`, as far as they are `known`."""
    sink = _sink and _sink()
    for acted, number in known(counts):
        if sink:
            sink(acted, number)
            continue
        with _lock:
            _counts[acted.name] = _counts.get(acted.name, 0) + number


def known(counts: Mapping[str, int]) -> Iterator[tuple[Acted, int]]:
    """Go through counts by names of `Acted`, without names that only another build knows."""
    return ((Acted[name], number) for name, number in counts.items() if name in Acted.__members__)


def taken() -> dict[str, int]:
    """Return what was counted since this was last asked, by names of `Acted`."""
    if not _counts:  # mostly; it is asked in each step
        return {}
    with _lock:
        counts = dict(_counts)
        _counts.clear()
    return counts


def send_to(sink: _Sink) -> None:
    """Let `sink`, a method, have what was and is counted in this process, while its object lives.

    Of several the last one has it.
    """
    global _sink
    _sink = WeakMethod(sink)
    add(taken())


def _begin() -> None:
    """A forked process has counts of its own, and no metric."""
    global _lock, _sink
    _lock, _sink = threading.Lock(), None
    _counts.clear()


os.register_at_fork(after_in_child=_begin)

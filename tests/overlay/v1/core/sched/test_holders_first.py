"""Who is skipped for a step, by what `_handle_blocked_waiting_request` says and leaves."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

module = pytest.importorskip("vllm_overlay.v1.core.sched.holders_first", reason="from 0.31.0 on")

RECEIVES = RequestStatus.WAITING_FOR_REMOTE_KVS


def proceeds(
    *,
    status: RequestStatus = RECEIVES,
    computed: int = 0,
    ready: bool = True,
    others: Sequence[str] = ("other",),
) -> bool:
    """Whether a request that comes to be `ready` goes on, with `computed` tokens left to it."""

    def handle(scheduler: Any, request: Any) -> bool:  # noqa: ANN401 - stand-ins
        request.num_computed_tokens = computed
        if ready:
            request.status = RequestStatus.WAITING
        return ready

    request = SimpleNamespace(status=status, num_computed_tokens=128)
    scheduler = SimpleNamespace(kv_holding_waiting=[request, *others])
    answer = module.holders_first(handle)(scheduler, request)
    assert isinstance(answer, bool)
    return answer


def test_who_has_lost_its_blocks_is_skipped_where_others_hold_some() -> None:
    assert not proceeds()
    assert proceeds(others=())


def test_who_has_received_goes_on() -> None:
    assert proceeds(computed=128)
    assert proceeds(computed=16)  # the blocks before the first that was lost


def test_who_still_receives_does_not() -> None:
    assert not proceeds(ready=False)
    assert not proceeds(ready=False, others=())


def test_who_waits_for_something_else_is_as_on_stock() -> None:
    assert proceeds(status=RequestStatus.WAITING)

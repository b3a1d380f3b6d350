"""What of an engine's heartbeats the newest request changes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.regressions.test_k32 import OFFERED, looked_for

heartbeats = pytest.importorskip(
    "vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.heartbeats", reason="from 0.22.0 on"
)

FIRST: dict[str, Any] = {"host": "a", "port": 1, "tp_size": 2, "pp_size": 3, "req_ids": {"r"}}


def test_where_it_is_and_how_large() -> None:
    known: Any = SimpleNamespace(**FIRST)
    heartbeats.go_to(known, {"remote_host": "b", "remote_port": 5, "tp_size": 4, "dcp_size": 8})
    assert vars(known) == {**FIRST, "host": "b", "port": 5, "tp_size": 4}, "of later releases"
    heartbeats.go_to(known, {"pp_size": 1})
    assert known.pp_size == 1
    later: Any = SimpleNamespace(**FIRST, dcp_size=1)
    heartbeats.go_to(later, {"dcp_size": 8})
    assert vars(later) == {**FIRST, "dcp_size": 8}


def test_of_one_request_all_is_as_on_stock() -> None:
    expected = {(OFFERED["remote_host"], OFFERED["remote_port"], OFFERED["tp_size"])}
    assert looked_for() == expected

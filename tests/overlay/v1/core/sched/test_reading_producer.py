"""Whose blocks are held back while a step runs: a producer's that reads, else as on stock."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.core.sched.scheduler import Scheduler

from tests.support.overlapped_engine import OverlappedEngine

pytest.importorskip("vllm_overlay.v1.core.sched.reading_producer", reason="from 0.24.0 on")

READS = {"bidirectional_kv_xfer": True}


def holds_back(role: str, extra: Any, depth: int = 2) -> bool:  # noqa: ANN401 - of any user
    held = []

    def make(**how: Any) -> Scheduler:  # noqa: ANN401 - as in the class
        transfer = how["vllm_config"].kv_transfer_config
        transfer.kv_role = role
        transfer.kv_connector_extra_config.update(extra)
        scheduler = Scheduler(**how)
        held.append(scheduler.defer_block_free)
        return scheduler

    OverlappedEngine(scheduler=make, depth=depth)  # type: ignore[arg-type]
    return held[0]


@pytest.mark.parametrize(
    "extra",
    [
        READS,
        {"connectors": [{}, {"kv_connector_extra_config": READS}]},
        {"connectors": [{"kv_connector_extra_config": {"connectors": [
            {"kv_connector_extra_config": READS}]}}]},
    ],
)  # fmt: skip
def test_a_producer_that_reads(extra: dict[str, Any]) -> None:
    assert holds_back("kv_producer", extra)


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"bidirectional_kv_xfer": False},
        {"connectors": None},
        {"connectors": ["NixlConnector", {}, {"kv_connector_extra_config": None}]},
        {"connectors": {"kv_connector_extra_config": READS}},
    ],
)
def test_another_producer_is_as_on_stock(extra: dict[str, Any]) -> None:
    assert not holds_back("kv_producer", extra)


@pytest.mark.parametrize("role", ["kv_both", "kv_consumer"])
@pytest.mark.parametrize("extra", [{}, READS])
def test_so_is_who_consumes(role: str, extra: dict[str, Any]) -> None:
    assert holds_back(role, extra)


@pytest.mark.parametrize("role", ["kv_both", "kv_producer"])
def test_nobody_does_where_no_steps_overlap(role: str) -> None:
    assert not holds_back(role, READS, depth=1)

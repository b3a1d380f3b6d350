"""What the worker's hooks call: who is told what when ranks of P are skipped."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.nixl_release import NixlConnectorWorker
from tests.support.nixl_worker import (
    agent_name,
    connect,
    make_worker,
    nixl_of,
    raising,
    receive,
    step,
)

pytest.importorskip(
    "vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.worker", reason="up to 0.20.2"
)

from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.worker import notify_skipped_ranks

REMOTE: Any = SimpleNamespace(engine_id="P", request_id="req:p")


def decoder(tp_size: int = 1, rank: int = 0) -> NixlConnectorWorker:
    worker = make_worker(tp_size=tp_size, tp_rank=rank, mla=True)
    connect(worker, "P", tp_size=4)
    connect(worker, "Q", tp_size=4)
    return worker


@pytest.mark.parametrize("read_rank", [0, 3])
def test_every_rank_but_the_one_that_is_read_hears_the_peers_own_id(read_rank: int) -> None:
    worker = decoder()
    notify_skipped_ranks(worker, "req-d", REMOTE, read_rank)
    expected = {agent_name("P", rank): [b"req:p:1"] for rank in range(4) if rank != read_rank}
    assert nixl_of(worker).heard == expected  # and nobody of another engine


def test_a_rank_tells_only_the_peers_assigned_to_it() -> None:
    worker = decoder(tp_size=2, rank=1)
    notify_skipped_ranks(worker, "req-d", REMOTE, 2)
    assert nixl_of(worker).heard == {agent_name("P", 3): [b"req:p:2"]}


@pytest.mark.parametrize("deaf", [(1,), (2,), (1, 2, 3)])
def test_a_rank_that_cannot_be_told_costs_a_log_line_and_a_count(
    deaf: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    worker = decoder()
    nixl = nixl_of(worker)
    agents = {agent_name("P", rank) for rank in deaf}
    nixl.on["send_notif"] = raising(RuntimeError("gone"), when=lambda agent, _: agent in agents)
    receive(worker, "req-other", engine_id="Q", tp_size=4)  # another engine's request goes on
    notify_skipped_ranks(worker, "req-d", REMOTE, 0)

    told = {agent_name("P", rank) for rank in {1, 2, 3} - set(deaf)}
    assert {agent for agent in nixl.heard if agent.startswith("P")} == told
    assert len([m for m in caplog.messages if "notification_failed" in m]) == len(deaf)
    assert "req-d" in caplog.text
    nixl.finish(*nixl.reads)
    assert step(worker) == (set(), {"req-other"})
    stats = worker.get_kv_connector_stats()
    assert stats is not None
    assert sum(stats.data["num_failed_notifications"]) == len(deaf)

    del nixl.on["send_notif"]  # one failure says nothing about the agent
    nixl.heard.clear()
    notify_skipped_ranks(worker, "req-d2", REMOTE, 0)
    assert set(nixl.heard) == {agent_name("P", rank) for rank in (1, 2, 3)}

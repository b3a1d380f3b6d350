"""What a worker says at once is sent stays in its connector's report, and nothing else is added."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip(
    "vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.served_elsewhere",
    reason="from 0.30.0 on",
)
from tests.support.nixl_release import connector_module
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.served_elsewhere import (
    says_what_is_served_elsewhere,
)


class Worker:
    """Of a context rank: what it says at once, and what a peer has told it."""

    def __init__(self, rank: int, at_once: set[str], heard: set[str]) -> None:
        self.pcp_rank, self.pcp_dcp_sharded = rank, False
        self._replicated_pcp_done_sending, self.heard = at_once, heard

    def get_transfer_results(self) -> SimpleNamespace:
        at_once, self._replicated_pcp_done_sending = self._replicated_pcp_done_sending, set()
        return SimpleNamespace(finished_sending=at_once | self.heard)


def reported(worker: Worker) -> set[str]:
    """What the release's own connector of a prefill server says of it."""
    config = SimpleNamespace(kv_role="kv_producer")
    side: Any = SimpleNamespace(connector_worker=worker, kv_transfer_config=config)
    sent: set[str] = connector_module.NixlConnector.get_transfer_results(
        side, set()
    ).finished_sending
    return sent


def test_a_rank_that_serves_nobody() -> None:
    worker = Worker(1, {"a", "b"}, {"nobody's"})
    assert reported(worker) == {"a", "b"}
    assert reported(worker) == set()


def test_the_rank_that_serves() -> None:
    assert reported(Worker(0, set(), {"a"})) == {"a"}


def test_its_name_is_that_of_what_it_surrounds() -> None:
    assert says_what_is_served_elsewhere(reported).__name__ == "reported"

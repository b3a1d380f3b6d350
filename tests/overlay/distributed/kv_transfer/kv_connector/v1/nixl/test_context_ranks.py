"""A context rank that no peer reads from receives as any does, and holds nothing for a peer."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from vllm.distributed import parallel_state

from tests.support.nixl_release import NixlConnectorMetadata, NixlConnectorWorker
from tests.support.nixl_worker import (
    connect,
    hold,
    make_vllm_config,
    make_worker,
    nixl_of,
    receive,
    stamp,
    step,
)

pytest.importorskip(
    "vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.context_ranks",
    reason="0.26.0 to 0.28.0",
)
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.context_ranks import (
    SilentContextWorker,
    of_context_rank,
)


@pytest.mark.parametrize(
    ("prefill", "decode", "rank", "silent"),
    [(1, 1, 0, False), (2, 1, 0, False), (2, 1, 1, True), (4, 1, 3, True), (2, 2, 1, False)],
)
def test_which_ranks_are_silent(prefill: int, decode: int, rank: int, silent: bool) -> None:
    config = make_vllm_config()
    config.parallel_config.prefill_context_parallel_size = prefill
    config.parallel_config.decode_context_parallel_size = decode
    group = SimpleNamespace(rank_in_group=rank)
    with mock.patch.object(parallel_state, "_PCP", group if prefill > 1 else None):
        kind = of_context_rank(NixlConnectorWorker, config)
    assert kind is (SilentContextWorker if silent else NixlConnectorWorker)


def silent() -> Any:  # noqa: ANN401 - a release has it or not
    worker = make_worker(worker_class=SilentContextWorker)
    assert worker.xfer_handshake_metadata is None
    return worker


def test_it_receives_as_any_rank() -> None:
    worker = silent()
    connect(worker)
    receive(worker)
    nixl_of(worker).finish(*nixl_of(worker).reads)
    assert step(worker) == (set(), {"req-d"})
    assert step(worker) == (set(), set())


def test_it_says_once_and_at_once_that_what_p_keeps_is_sent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = silent()
    hold(worker, "req-p", time.perf_counter() - 1)
    assert worker.get_finished() == ({"req-p"}, set())
    assert step(worker) == (set(), set())
    assert not worker._reqs_to_process
    assert not worker._reqs_to_send
    assert "expired" not in caplog.text


def test_what_it_is_handed_stays_as_it_is() -> None:
    """It may be another connector's too, or another worker's of the process."""
    metadata = NixlConnectorMetadata()
    metadata.reqs_in_batch.add("req-p")
    metadata.reqs_not_processed.add("other")
    metadata.reqs_to_send["req-p"] = float("inf")
    silent().start_load_kv(stamp(metadata))
    assert metadata.reqs_in_batch == {"req-p"}
    assert metadata.reqs_not_processed == {"other"}
    assert set(metadata.reqs_to_send) == {"req-p"}

"""Where all of the NIXL connector is one file, names of later releases mean the same."""

from __future__ import annotations

import pytest

from tests.support.nixl_worker import make_worker

pytest.importorskip(
    "vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl_connector", reason="up to 0.19.1"
)


def test_the_topology_goes_by_both_names() -> None:
    worker = make_worker(tp_size=2)
    assert worker.transfer_topo is worker.kv_topo
    assert worker.transfer_topo.tp_ratio(1) == 2

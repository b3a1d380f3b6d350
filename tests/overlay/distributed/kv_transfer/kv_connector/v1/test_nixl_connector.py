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


@pytest.mark.parametrize("mla", [False, True])
@pytest.mark.parametrize("ours", [1, 2, 4, 8, 16])
def test_a_peer_with_one_head_each_has_copies_for_ranks_with_one_head(ours: int, mla: bool) -> None:
    topology = make_worker(tp_size=ours, mla=mla).kv_topo
    for size in (1, 2, 4, 8, 16, 32):
        topology.remote_tp_size["P"] = size
        as_before = bool(vars(type(topology).__mro__[1])["is_kv_replicated"](topology, "P"))
        other_than_before = size == topology.total_num_kv_heads > ours
        assert as_before is (size >= topology.total_num_kv_heads)
        assert topology.is_kv_replicated("P") is (as_before and not other_than_before)

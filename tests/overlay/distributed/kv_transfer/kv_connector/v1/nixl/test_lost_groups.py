"""Which lost blocks a worker names."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

lost_groups = pytest.importorskip(
    "vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.lost_groups",
    reason="from 0.31.0 on",
)


@pytest.mark.parametrize(("groups", "named"), [(1, {3, 4}), (2, set()), (3, set())])
def test_blocks_of_one_group_are_named_once(groups: int, named: set[int]) -> None:
    told = [{3, 4}, set()]
    config = SimpleNamespace(kv_cache_groups=[object()] * groups)
    worker = SimpleNamespace(kv_cache_config=config)
    wrapped = lost_groups.of_one_group(lambda _: told.pop(0))
    assert wrapped(worker) == named
    assert told == [set()], "upstream's own method was asked, and has forgotten them"
    assert wrapped(worker) == set()


def test_a_worker_without_a_configuration_names_what_it_does_on_stock() -> None:
    assert lost_groups.of_one_group(lambda _: {3})(SimpleNamespace()) == {3}

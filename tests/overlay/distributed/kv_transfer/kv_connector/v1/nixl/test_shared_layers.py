"""What a worker keeps of caches of which one is another layer's, and does with them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.nixl_release import NixlConnectorWorker
from tests.support.nixl_worker import make_worker
from tests.support.stand_in_model import LAYERS

shared_layers = pytest.importorskip(
    "vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.shared_layers",
    reason="up to 0.23.0",
)


def test_caches_of_layers_in_a_group_are_kept_in_their_order() -> None:
    worker: Any = SimpleNamespace(_layer_specs={"a": 1, "b": 2, "c": 3})
    caches: Any = {"c": "third", "sharing": "third", "a": "first"}
    assert list(shared_layers.owned_caches(worker, caches).items()) == [
        ("c", "third"),
        ("a", "first"),
    ]
    assert shared_layers.owned_caches(worker, {"b": "second"}) == {"b": "second"}
    assert "sharing" in caches


class Sharing(NixlConnectorWorker):
    """A worker of a model with a layer that shares."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches({**kv_caches, "sharing": kv_caches["group0.layer0"]})


class BufferedSharing(Sharing):
    """One whose peers read and write the memory of the host."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self.use_host_buffer = True
        super().register_kv_caches(kv_caches)


OWNERS = [f"group0.layer{i}" for i in range(LAYERS)]


def test_what_is_done_to_blocks_in_place_is_done_once() -> None:
    """After a read in parts, or of another layout: to each cache that the worker lists."""
    assert list(make_worker(worker_class=Sharing).device_kv_caches) == OWNERS


def test_what_has_arrived_in_a_host_buffer_is_all_that_is_copied_from_one() -> None:
    """From each buffer that there is, also from one that is registered with no peer."""
    worker = make_worker(worker_class=BufferedSharing)
    assert list(worker.host_xfer_buffers) == list(worker.device_kv_caches) == OWNERS
